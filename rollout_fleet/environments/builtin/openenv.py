"""Environments served by OpenEnv: one WebSocket session an episode, reset and step as its own client sends them.

    tasks:
      environment: openenv
      options: {url: "http://127.0.0.1:8000", action: message, observation: text}

OpenEnv's library is not needed on the node; tests compare this with its server's messages (openenv-core 0.3).
"""

import json
from typing import Any

from rollout_fleet.environments.protocol import Action, Chat, StepResult
from rollout_fleet.environments.tools import check_depth

MESSAGE_BYTES = 4 << 20
CONNECT_S = 20.0


class OpenEnv:
    """Multi turn. Problem: {"reset": {...}}, optional: keyword arguments of the environment's reset.

    Without a seed among them, the samples of a group share the group's.

    Options:
        url: of the server, http:// or https://.
        action: field of the action that takes what the policy said; '' when it says the whole action, as JSON.
        observation: field of the observation that the policy reads; '' for all of it, as JSON.
        prompt: template of the first message, with {observation}.
    """

    NEEDS = ("aiohttp",)

    def __init__(
        self,
        problem: dict[str, Any],
        *,
        seed: int,
        group_seed: int,
        url: str,
        action: str = "",
        observation: str = "",
        prompt: str = "{observation}",
    ) -> None:
        self._url = url.rstrip("/").replace("http", "ws", 1) + "/ws"
        self._reset = {"seed": group_seed, **problem.get("reset", {})}
        self._action = action
        self._observation = observation
        self._prompt = prompt
        self._session: Any = None
        self._socket: Any = None
        self._malformed = 0.0

    async def reset(self) -> Chat:
        import aiohttp

        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_S))
        self._socket = await self._session.ws_connect(self._url, max_msg_size=MESSAGE_BYTES)
        data = await self._ask("reset", self._reset)
        return Chat((("user", self._prompt.replace("{observation}", self._text(data["observation"]))),))

    async def step(self, action: Action) -> StepResult:
        """One action; one that the server refuses is answered with its words, and counted."""
        if not action.ended:
            return StepResult(metrics={"malformed": self._malformed})
        try:
            data = await self._ask("step", self._sent(action.text))
        except InvalidAction as error:
            self._malformed += 1
            return StepResult(Chat((("user", f"error: {error}"),)), done=False, metrics={"malformed": self._malformed})
        shown = Chat((("user", self._text(data["observation"])),))
        reward = float(data.get("reward") or 0.0)
        return StepResult(shown, reward, bool(data.get("done")), {"malformed": self._malformed})

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.send_str(json.dumps({"type": "close"}))
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """One message and its answer; raises RuntimeError for an error of the server's or a closed connection."""
        await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        message = await self._socket.receive()
        if not isinstance(message.data, str):
            raise RuntimeError(f"{self._url} ended the session: {message.type.name} {message.data}")
        try:
            answer = json.loads(message.data)
        except ValueError as error:
            raise RuntimeError(f"{self._url} answered no JSON: {error}") from None
        found = answer.get("data", {})
        if answer.get("type") != "error":
            return found
        if found.get("code") == "VALIDATION_ERROR":
            raise InvalidAction("; ".join(error.get("msg", "") for error in found.get("errors", [])) or str(found))
        raise RuntimeError(f"{self._url} answered {found.get('code')}: {found.get('message')}")

    def _sent(self, text: str) -> Any:
        if self._action:
            return {self._action: text.strip()}
        try:
            found = json.loads(text)
            check_depth(found)
        except (ValueError, RecursionError) as error:
            raise InvalidAction(str(error)) from None
        return found

    def _text(self, observation: Any) -> str:
        shown = observation.get(self._observation, "") if self._observation else observation
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


class InvalidAction(Exception):
    """The action cannot be read; the message says why."""
