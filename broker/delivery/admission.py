"""Which task a node may lease: the staleness rule, and the bound on memory."""

from broker.contract import RunInfo
from broker.delivery.task_table import TaskTable
from common.staleness import may_lease


def admits_oldest(tasks: TaskTable, run: RunInfo, steps: int, wanted: int) -> bool:
    """Whether the oldest pending task may be leased now.

    While what is held and on the way exceeds `max_bytes`, only tasks that the learner's next take may need are
    leased: those with fewer than that many older ones ready or leased. So memory is bounded and the learner never
    waits for a task that nobody may start.

    Args:
        tasks: of the run.
        run: its fixed facts.
        steps: optimizer steps from the one at which task 0 is due to the version that the node holds.
        wanted: groups that the learner needs to go on.
    """
    if not tasks.pending:
        return False
    serial = tasks.pending[0]
    if not may_lease(serial, steps, run.groups_per_step, run.max_staleness, tasks.passed_before(serial)):
        return False
    return tasks.bytes_expected() <= run.max_bytes or tasks.older_in_progress(serial) < wanted
