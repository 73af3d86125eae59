"""When a node reached each stage on its way into the job."""

import subprocess
import sys
import time

from rollout_fleet.join_timing import JoinTimer, process_age_s


def test_stages_count_from_the_start_of_the_process_and_only_once() -> None:
    now = [100.0]
    before = time.time()
    timer = JoinTimer(3.0, lambda: now[0])
    assert before - 3.0 <= timer.times.started_s <= time.time() - 3.0
    now[0] = 101.5
    assert timer.reached("registered")
    now[0] = 110.0
    assert timer.reached("engine")
    assert not timer.reached("registered")
    assert (timer.times.registered, timer.times.engine, timer.times.staged) == (4.5, 13.0, 0.0)


def test_the_age_of_a_process_is_counted_from_its_start_not_from_the_import() -> None:
    program = (
        "import time; time.sleep(0.4); from rollout_fleet.join_timing import process_age_s; print(process_age_s())"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert 0.4 <= float(done.stdout) <= time.monotonic() - started + 0.02
    assert process_age_s() > 0
