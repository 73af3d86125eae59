"""The page in a real browser: start, live update, drill-down, colours, injection, keys, narrow screens, no JavaScript.

The server is the real command in a process of its own. Every test ends without an error on the browser's console.
"""

import json
from collections.abc import Iterator

import msgspec
import pytest

from broker.contract import LedgerEntry
from common.process.run_dir import RunDir, write_json
from common.segments import SegmentWriter
from common.transcripts import Transcript, Turn
from common.waits import WaitFor, WaitKind
from tests.rigs.chromium import Page, browser, serving
from tests.rigs.configs import LEARNER, node_status, status_of
from tests.rigs.telemetry import Fixture

EVIL = "<script>document.title='broken in'</script><img src=x onerror=\"document.title='broken in'\">"


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    made = Fixture(tmp_path_factory.mktemp("page") / "run", 50, nodes=60)
    made.write(0, 40)
    return made


@pytest.fixture(scope="module")
def address(fixture: Fixture, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("server"), str(fixture.run.path)) as (address, _):
        yield address


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as window:
        yield window


@pytest.fixture
def page(window: Page) -> Iterator[Page]:
    """A page with nothing of the test before."""
    window.size(1440)
    yield window
    found, window.errors = window.errors, []
    assert found == []
    assert window.get("document.title") != "broken in"
    window.call("Emulation.setScriptExecutionDisabled", value=False)
    window.call("Network.clearBrowserCookies")
    window.get("(() => { try { localStorage.clear() } catch { /* an empty page has none */ } })()")
    window.open("about:blank")


def rows(page: Page) -> int:
    return page.get("document.querySelectorAll('tbody tr').length")


def test_the_page_starts_and_a_line_that_is_written_changes_it_without_a_reload(page, address, fixture):
    page.open(address)
    page.has("Who waits for whom")
    page.has("50 of 50")
    page.until("document.querySelectorAll('path.line').length >= 9")
    page.get("globalThis.same = true")
    fixture.steps += 1
    fixture.write(50, 0)
    page.has("51 of 50")
    label = "document.querySelector('.plot').ariaLabel"
    page.until(f"{label}.includes('steps 0 to 50')")
    assert page.get("globalThis.same") is True
    state = page.get("document.getElementById('link').textContent")
    assert state == "not running", "the server answers, and no broker of the run does"


def test_the_overview_shows_the_newest_states_of_the_first_processes(page, address):
    page.open(address)
    page.until("document.querySelector('.overview .lanes canvas').ariaLabel.includes('learner')")
    legend = page.get("document.querySelector('.overview p.legend').innerText")
    assert "training" in legend and "publishing" not in legend, "only states that are there"
    page.click(".overview .bar-top a")
    page.until("location.hash === '#timeline/0'")
    page.has("1 to 40 of 61")


def test_values_appear_under_the_pointer_and_under_the_arrow_keys(page, address):
    page.open(address)
    page.until("document.querySelector('.chart path.line') !== null")
    box = page.get("(b => [b.x, b.y, b.width])(document.querySelector('.plot').getBoundingClientRect())")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] / 2, y=box[1] + 60)
    page.until("/^step \\d+/.test(document.querySelector('.tip:not([hidden])')?.innerText ?? '')")
    page.get("document.querySelectorAll('.plot')[2].focus()")
    page.press("ArrowLeft")
    page.until("document.querySelectorAll('.plot')[2].innerText.includes('training')")


def test_a_task_leads_to_its_transcript_and_tokens_change_colour(page, address):
    page.open(f"{address}#tasks/0/199")
    page.click("tbody tr a")
    page.has("Task 199")
    page.until("document.querySelectorAll('.policy .token').length === 24")
    tokens = "[...document.querySelectorAll('.policy .token')].map((t) => t.className)"
    page.has("version 48")
    by_version = page.get(tokens)
    assert by_version[:12] == ["token v0"] * 5 + ["token v1"] * 7 and by_version[12:] == ["token v1"] * 12
    colours = page.get(
        "[0, 5].map((i) => getComputedStyle(document.querySelectorAll('.policy .token')[i]).backgroundColor)"
    )
    assert len(set(colours)) == 2 and "rgba(0, 0, 0, 0)" not in colours
    page.press("c")
    page.until(f"{tokens}.every((name) => /^token r[0-4]$/.test(name))")
    page.click("button[data-mode=mask]")
    page.until(f"{tokens}.every((name) => /^token m[01]$/.test(name)) && {tokens}.includes('token m0')")
    assert "log-probability" in page.get("document.querySelector('.policy .token').title")
    page.press("Escape")
    page.until("location.hash.startsWith('#tasks/0')")


def test_tables_are_filtered_by_the_server_and_keys_move_through_them(page, address):
    page.open(address)
    page.until("document.body.dataset.steps !== undefined")
    page.press("3")
    page.until("document.querySelectorAll('tbody tr').length === 50")
    page.has("1 to 50 of 60")
    page.press("/")
    page.until("document.activeElement.type === 'search'")
    for letter in "0057":
        page.press(letter)
    page.until("document.querySelectorAll('tbody tr').length === 1")
    page.press("Escape")
    page.until("document.querySelectorAll('tbody tr').length === 50")
    page.press("j")
    page.press("j")
    page.press("k")
    assert page.get("[...document.querySelectorAll('tr')].findIndex((r) => r.ariaSelected === 'true')") == 1
    page.press("Enter")
    page.until("location.hash === '#timeline/0/node-0000'")
    page.has("1 to 1 of 1")
    page.until("document.querySelector('canvas').width > 100")
    assert page.get("document.querySelector('canvas').ariaLabel").startswith("States over time. Newest: node-0000")


@pytest.mark.parametrize("tab", ["overview", "timeline/0", "nodes/0", "tasks/0", "transcripts/0", "transcript/0/199"])
def test_nothing_is_wider_than_a_narrow_screen(page, address, tab):
    page.size(390, 844, dark=True)
    page.open(f"{address}#{tab}")
    page.until("document.querySelector('main').innerText.length > 50")
    assert page.get("document.documentElement.scrollWidth") <= 390
    assert page.get("document.documentElement.dataset.theme") == "dark"
    page.click("#theme")
    page.until("document.documentElement.dataset.theme === 'light'")


def test_text_of_a_run_is_never_html(page, tmp_path):
    run = RunDir(tmp_path / EVIL.replace("/", "∕"))
    run.path.mkdir()
    node = node_status(EVIL, alive=True, state=EVIL, wait=WaitFor(WaitKind.REPAIR, cause=EVIL), host=EVIL)
    write_json(run.status_json, status_of(node, learner=msgspec.structs.replace(LEARNER, alarms=[EVIL])))
    write_json(run.ledger_json, [LedgerEntry(7, "dead", 1, [EVIL], None, None, None, None, EVIL)])
    line = {"step": 0, "reward_mean": 0.5, "samples_failed_by_reason": {EVIL: 1}}
    evaluation = {"kind": "evaluation", "step": 1, "policy_version": 1, "mean_reward": 0.7, "dataset": EVIL}
    run.metrics.write_text(f"{json.dumps(line)}\n{json.dumps(evaluation)}\n")
    turn = Turn(author="policy", text="", tokens=[1, 2], pieces=[EVIL, "</pre>"], reward=1.0)
    plain = Turn(author="environment", text=EVIL, tokens=[], pieces=[])
    names = {"stop_reason": EVIL, "error": EVIL, "metrics": {EVIL: 1.0}, "node_id": EVIL}
    told = Transcript(serial=7, sample=0, time_s=1.0, why=["failed"], turns=[turn, plain], **names)
    SegmentWriter(run.transcripts, "steps", 1 << 20).write(msgspec.json.encode(told) + b"\n")
    with serving(tmp_path, str(run.path)) as (address, _):
        for tab in ("overview", "nodes/0", "tasks/0", "transcripts/0", "transcript/0/7"):
            page.open("about:blank")
            page.open(f"{address}#{tab}")
            page.has("<img src=x onerror=")
            assert page.get("document.images.length + document.querySelectorAll('main script').length") == 0
            if tab == "overview":  # a watch rule's sentence comes first
                assert page.get("document.querySelector('.waits li.urgent').textContent") == EVIL
        assert page.get("document.querySelectorAll('pre')[0].textContent") == EVIL + "</pre>"
        assert page.get("document.querySelectorAll('pre')[1].textContent") == EVIL
        page.open("about:blank")


def test_several_runs_are_drawn_side_by_side(page, fixture, tmp_path):
    other = Fixture(tmp_path / "other", 30, nodes=2, seed=1)
    other.write(0, 4)
    with serving(tmp_path, str(fixture.run.path), str(other.run.path)) as (address, _):
        page.open(address)
        page.until("document.querySelector('.chart').querySelectorAll('path.line').length === 2")
        page.until("document.querySelectorAll('.facts .run').length === 2")
        colours = page.get(
            "[...document.querySelectorAll('.chart path.line')].slice(0, 2).map((p) => getComputedStyle(p).stroke)"
        )
        assert len(set(colours)) == 2
        page.press("4")
        page.until("document.querySelectorAll('tbody tr').length > 0")
        page.press("]")
        page.until("location.hash === '#tasks/1'")
        page.until("document.querySelector('.bar-top').innerText.includes('128')")
        page.open("about:blank")  # before the server ends


def test_a_browser_without_javascript_gets_a_table(page, address):
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.open(address)
    page.has("Without JavaScript")
    page.has("of 2 allowed")


def test_with_a_token_the_page_works_after_one_login_and_shows_nothing_before(page, fixture, tmp_path):
    token = tmp_path / "token"
    token.write_text("a-token-of-the-test")
    token.chmod(0o600)
    with serving(tmp_path, str(fixture.run.path), "--token-file", str(token)) as (address, _):
        page.open(address)
        page.has("this page needs the token")
        assert "reward" not in page.text()
        page.open(f"{address}?token=a-token-of-the-test")
        page.until("document.querySelectorAll('path.line').length >= 9")
        assert "token" not in page.get("location.href")
        page.open("about:blank")
        page.errors = [error for error in page.errors if "401" not in error]  # the browser names them itself
