"""Where the broker of a run listens: as the config says, or as the broker wrote to RUN/broker.json."""

import time

from common.config.network_checks import fixed_address
from common.config.schema import BaseConfig
from common.errors import BrokerUnreachable
from common.process.run_dir import RunDir

POLL_S = 0.1


def find_broker(config: BaseConfig, run: RunDir, wait_s: float) -> str:
    """The configured address, or the one in RUN/broker.json once a living broker wrote it: roles start in any order.

    After `wait_s` it takes the address of a process that is not alive here, which may run on another machine.
    Raises BrokerUnreachable when there is no RUN/broker.json by then.
    """
    fixed = fixed_address(config)
    if fixed is not None:
        return fixed
    end = time.monotonic() + wait_s
    while (found := running_broker(run)) is None and time.monotonic() < end:
        time.sleep(POLL_S)
    if found is not None:
        return found
    if (file := run.broker()) is not None:
        return file.address
    hint = "is `slipstream broker CONFIG` running? A node reaches another machine's broker with --join tcp://HOST:PORT"
    raise BrokerUnreachable(f"no broker wrote {run.broker_json} within {wait_s:.0f} s; {hint}")


def running_broker(run: RunDir) -> str | None:
    """The address in RUN/broker.json when the process that wrote it is alive on this machine."""
    file = run.broker()
    return file.address if file is not None and file.runs_here else None
