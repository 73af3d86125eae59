"""A walk to a field of a grid: each turn is one move, and the environment says where it led."""

from rollout_fleet.environments.protocol import Action, Limits, StepResult

MOVES = {"L": (-1, 0), "R": (1, 0), "U": (0, -1), "D": (0, 1)}


class Walk:
    """Problem: {"start": [0, 3], "goal": [2, 2]}. Reward 1 at the goal; another word than L, R, U, D ends the walk."""

    LIMITS = Limits(step_s=5.0)

    def __init__(self, problem, *, seed, size=4, moves=6):
        self.place, self.goal, self.size, self.left = problem["start"], problem["goal"], size, moves

    async def reset(self):
        return self.seen()

    async def step(self, action: Action) -> StepResult:
        move = MOVES.get(action.text) if action.ended else None
        self.left -= 1
        if move is not None:
            self.place = [min(max(at + by, 0), self.size - 1) for at, by in zip(self.place, move, strict=True)]
        found = self.place == self.goal
        done = found or move is None or self.left == 0
        return StepResult(f"\n{self.seen()}", float(found), done, {"moves_left": float(self.left)})

    def seen(self):
        return "at {},{} to {},{}: ".format(*self.place, *self.goal)
