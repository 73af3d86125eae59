"""The page in a real browser: start, live update, drill-down, colours, injection, keys, narrow screens, no JavaScript.

The server is the real command in a process of its own. Every test ends without an error on the browser's console.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest

from broker.contract import LedgerEntry
from common.process.run_dir import RunDir, write_json
from common.segments import SegmentWriter
from common.transcripts import Transcript, Turn
from common.waits import WaitFor, WaitKind
from launch.resolve_target import config_of
from learner.loop.run_files import write_record
from tests.rigs.chromium import Page, browser, serving
from tests.rigs.configs import LEARNER, node_status, status_of
from tests.rigs.telemetry import Fixture, open_folder

EVIL = "<script>document.title='broken in'</script><img src=x onerror=\"document.title='broken in'\">"


@pytest.fixture(scope="module")
def fixture() -> Iterator[Fixture]:
    with open_folder() as folder:
        made = Fixture(folder / "run", 50, nodes=60)
        made.write(0, 40)
        yield made


@pytest.fixture
def shared() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


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


# how many pixels of the first chart have a colour of the page's style
PIXELS = """(() => {
  const canvas = document.querySelector('.chart canvas');
  const wanted = getComputedStyle(canvas).getPropertyValue('--%s').trim();
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(wanted.slice(i, i + 2), 16));
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) count += data[i] === r && data[i + 1] === g && data[i + 2] === b;
  return count;
})()"""


def rows(page: Page) -> int:
    return page.get("document.querySelectorAll('tbody tr').length")


def test_the_page_starts_and_a_line_that_is_written_changes_it_without_a_reload(page, address, fixture):
    page.open(address)
    page.has("Who waits")
    page.has("50 of 50 steps")
    page.until("document.querySelectorAll('.chart canvas').length >= 9")
    page.get("globalThis.same = true")
    fixture.steps += 1
    fixture.write(50, 0)
    page.has("51 of 50 steps")
    label = "document.querySelector('.plot').ariaLabel"
    page.until(f"{label}.includes('steps 0 to 50')")
    assert page.get("globalThis.same") is True
    state = page.get("document.getElementById('link').textContent")
    assert state == "not running", "the server answers, and no broker of the run does"


def test_the_overview_shows_the_newest_states_of_the_first_processes(page, address):
    page.open(address)
    page.until("document.querySelector('.overview .lanes canvas').ariaLabel.includes('learner')")
    legend = page.get("document.querySelector('.overview p.legend').innerText")
    assert "training" in legend and "weights" in legend and "other" not in legend, "only kinds of states that are there"
    page.click(".overview .bar-top a")
    page.until("location.hash === '#timeline/0'")
    page.has("1 to 40 of 61")


def mouse(page: Page, kind: str, x: float, y: float) -> None:
    page.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, button="left", buttons=1, clickCount=1)


def place(page: Page, selector: str) -> list[float]:
    """[x, y, width, height] of an element in the window."""
    page.until(f"document.querySelector('{selector}') !== null")
    return page.get(
        f"(b => [b.x, b.y, b.width, b.height])(document.querySelector('{selector}').getBoundingClientRect())"
    )


TIPS = "[...document.querySelectorAll('.chart .tip:not([hidden])')].map((tip) => tip.innerText)"
LABELS = "[...document.querySelectorAll('.plot')].map((plot) => plot.ariaLabel).filter(Boolean)"


def test_values_appear_in_every_chart_under_the_pointer_and_under_the_arrow_keys(page, address):
    page.open(address)
    x, y, width, _ = place(page, ".chart .u-over")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + width - 1, y=y + 60)
    page.until(f"{TIPS}.length >= 9")
    tips = page.get(TIPS)
    assert len({tip.split("\n")[0] for tip in tips}) == 1, "one step in all charts"
    assert " to 1)" in tips[0], "no reward is above 1, so the band ends there"
    page.get("document.querySelectorAll('.plot')[2].focus()")
    page.press("ArrowLeft")
    page.until(f"{TIPS}[2]?.includes('training')")
    page.get("document.querySelectorAll('.plot')[2].blur()")
    page.until(f"{TIPS}.length === 0")


def test_a_drag_zooms_all_charts_and_a_double_click_ends_it(page, address):
    page.open(address)
    x, y, width, _ = place(page, ".chart .u-over")
    for kind, share in (("Moved", 0.5), ("Pressed", 0.5), ("Moved", 0.75), ("Released", 0.75)):
        mouse(page, kind, x + share * width, y + 60)
    page.until(f"{LABELS}.every((label) => /shown step 2[456] to step 3[78]/.test(label))")
    page.get("document.querySelector('.controls button:last-of-type').click()")
    page.until(f"{LABELS}.every((label) => !label.includes('shown'))")


def test_the_axis_the_smoothing_and_a_logarithm_change_the_charts(page, address, fixture):
    page.open(address)
    page.click("button[data-axis=tokens]")
    page.until(f"{LABELS}.every((label) => label.includes('over tokens'))")
    x, y, *_ = place(page, ".chart .u-over")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 1, y=y + 60)
    page.until(f"{TIPS}[0]?.startsWith('768 trained tokens')")
    page.click("button[data-axis=time]")
    page.until(f"{LABELS}.every((label) => label.includes('over time'))")
    page.get(
        "(s => { s.value = 0.9; s.dispatchEvent(new Event('input')) })(document.querySelector('input[type=range]'))"
    )
    rewards = [json.loads(line)["reward_mean"] for line in fixture.run.metrics.read_text().splitlines()]
    weights = [0.9**age for age in range(len(rewards))]
    smoothed = sum(w * r for w, r in zip(weights, reversed(rewards), strict=True)) / sum(weights)
    page.until(f"{LABELS}[0].includes('newest: mean {smoothed:.3f}'.replace(/0+$/, ''))")
    picture = "document.querySelectorAll('.chart canvas')[2].toDataURL()"
    before = page.get(picture)
    page.get("document.querySelectorAll('.chart')[2].querySelector('button').click()")
    page.until(f"{picture} !== {json.dumps(before)}")


@pytest.mark.parametrize("steps", [1, 20_000])
def test_a_run_of_any_length_is_drawn(page, tmp_path, steps):
    made = Fixture(tmp_path / "run", steps, nodes=2)
    made.write(0, 1)
    with serving(tmp_path, str(made.run.path)) as (address, _):
        page.open(address)
        page.has(f"{steps:,} of {steps:,} steps")
        page.until(f"{LABELS}[0]?.startsWith('Reward, steps ') && {LABELS}[0].includes('to {steps - 1:,},')")
        page.until(f"{PIXELS % 'c0'} > 5")
        page.open("about:blank")


def test_a_logarithm_that_leaves_no_value_can_be_turned_off_and_a_tile_has_the_final_model(page, tmp_path):
    made = Fixture(tmp_path / "run", 40, nodes=2)
    made.write(0, 1)
    lines = [json.loads(line) for line in made.run.metrics.read_text().splitlines()]
    done = config_of(made.run).run.steps
    lines = [line | {"reward_mean": 0.0} for line in lines if line.get("kind") != "evaluation"]
    lines.append({"kind": "evaluation", "step": done, "policy_version": done, "dataset": "sums", "mean_reward": 0.75})
    made.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_record(made.run, 0, "done", done)
    made.run.model.mkdir()
    (made.run.model / "config.json").write_text("{}")
    with serving(tmp_path, str(made.run.path)) as (address, _):
        page.open(address)
        page.until(f"{LABELS}[0]?.startsWith('Reward')")
        page.has("sums, final model")
        button = "document.querySelector('.chart button')"
        page.get(f"{button}.click()")
        page.until(f"{button}.getAttribute('aria-pressed') === 'true'")
        assert page.get(f"{button}.hidden") is False
        page.open("about:blank")


def test_a_run_that_failed_leads_to_the_log_of_its_learner(page, tmp_path, shared):
    made = Fixture(shared / "run", 5, nodes=2)
    made.write(0, 1)
    write_record(made.run, 0, "failed", 5)
    made.run.logs.mkdir()
    (made.run.logs / "learner-0.log").write_text("the cause of the failure\n")
    with serving(tmp_path, str(made.run.path)) as (address, _):
        page.open(address)
        page.until("document.querySelector('.badge.failed').textContent === 'failed'")
        page.click(".strip.urgent li.urgent a")
        page.has("the cause of the failure")
        page.open("about:blank")


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


def test_transcripts_have_previews_are_filtered_by_reward_and_have_neighbours(page, address):
    page.open(f"{address}#transcripts/0/{quote('reward>0.5')}")
    page.until("document.querySelectorAll('tbody tr').length === 10")
    assert "What is 412 + 309?" in page.get("document.querySelector('.preview').innerText")
    page.click("tbody tr a")
    page.until("document.querySelectorAll('nav.samples a').length > 0")
    page.press("n")
    page.until("location.hash.startsWith('#transcript/0/192/0')")
    page.press("p")
    page.until("location.hash.startsWith('#transcript/0/196/0')")
    page.until("document.querySelector('.bar-top button').disabled")  # it is the first of the list
    page.press("Escape")


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


TABS = ("overview", "timeline/0", "nodes/0", "tasks/0", "transcripts/0", "transcript/0/199", "config/0", "logs/0")


@pytest.mark.parametrize("tab", TABS)
def test_nothing_is_wider_than_a_narrow_screen(page, address, tab):
    page.size(390, 844, dark=True)
    page.open(f"{address}#{tab}")
    page.until("document.querySelector('main').innerText.length > 50")
    assert page.get("document.documentElement.scrollWidth") <= 390
    assert page.get("document.documentElement.dataset.theme") == "dark"
    page.click("#theme")
    page.until("document.documentElement.dataset.theme === 'light'")
    for dark in (False, True):  # the system's theme changes, and the choice stays
        page.size(390, 844, dark=dark)
        assert page.get("document.documentElement.dataset.theme") == "light"


def test_text_of_a_run_is_never_html(page, tmp_path, shared):
    run = RunDir(shared / EVIL.replace("/", "∕"))
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
    run.logs.mkdir()
    (run.logs / "learner-0.log").write_text(EVIL)
    with serving(tmp_path, str(run.path)) as (address, _):
        for tab in ("overview", "nodes/0", "tasks/0", "transcripts/0", "logs/0", "transcript/0/7"):
            page.open("about:blank")
            page.open(f"{address}#{tab}")
            page.has("<img src=x onerror=")
            assert page.get("document.images.length + document.querySelectorAll('main script').length") == 0
            if tab == "overview":  # a watch rule's sentence comes first
                assert page.get("document.querySelector('.waits li.urgent').textContent") == EVIL
        page.until("document.querySelectorAll('.turn pre').length === 2")
        assert page.get("document.querySelectorAll('pre')[0].textContent") == EVIL + "</pre>"
        assert page.get("document.querySelectorAll('pre')[1].textContent") == EVIL
        page.open("about:blank")


def test_several_runs_are_drawn_side_by_side(page, fixture, tmp_path):
    other = Fixture(tmp_path / "other", 30, nodes=2, seed=1)
    other.write(0, 4)
    with serving(tmp_path, str(fixture.run.path), str(other.run.path)) as (address, _):
        page.open(address)
        page.until("document.querySelector('.chart').querySelectorAll('.key').length === 2")
        page.until("document.querySelectorAll('.facts .run').length === 2")
        page.until(f"{PIXELS % 'c0'} > 20 && {PIXELS % 'c1'} > 20")
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
        page.until("document.querySelectorAll('.chart canvas').length >= 9")
        assert "token" not in page.get("location.href")
        page.open("about:blank")
        page.errors = [error for error in page.errors if "401" not in error]  # the browser names them itself
