"""The report of a run: what is drawn and what is not, hostile texts, its size, and what a browser makes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_megatron.cli.main import main
from grpo_megatron.report.page import render_report
from grpo_megatron.report.run_folder import RunFolder
from grpo_megatron.report.series import MAX_BUCKETS
from tests.browser import DESKTOP, PHONE, WIDTHS, Browser
from tests.report.material import HOSTILE, event, group, make_run, metrics_of, sample

EVENTS = [
    event("started", 0),
    event("guard", 7, "guards.gradients=skip: step 7: the gradient is not finite"),
    event("stopped", 20, f"stopped by SIGTERM after 20 steps {HOSTILE}"),
    event("resumed", 20),
]
SAMPLES = [
    group([sample(0, 1.0, "the right answer"), sample(1, 0.0, HOSTILE), sample(2, None, failure=HOSTILE)], HOSTILE)
]


def opened(folder: Path) -> RunFolder:
    run = RunFolder(folder)
    run.update()
    return run


def data_of(page: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def titles(page: str) -> list[str]:
    return [panel["title"] for panel in data_of(page)["panels"]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "one", events=EVENTS, samples=SAMPLES)
    (folder / "config_attempts").mkdir()
    (folder / "config_attempts" / "002.yaml").write_text(yaml.safe_dump({"actor": {"optim": {"lr": 2e-6}}}))
    return folder


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_metrics_that_nobody_knows_appear_and_empty_panels_do_not(run: Path) -> None:
    page = render_report([opened(run)])
    shown = titles(page)
    assert {"Training reward", "Parts of the reward", "Reward by source", "mine/of/x"} <= set(shown)
    assert "KL divergence" not in shown and "Loss of the critic" not in shown
    assert data_of(page)["constants"] == {"actor/ppo_kl": [0.0], "timing_s/step": [10.0]}  # said, not drawn
    mine = next(panel for panel in data_of(page)["panels"] if panel["title"] == "mine/of/x")
    assert mine["curves"] == [["mine/of/x/max", "max"], ["mine/of/x/mean", "mean"]]


def test_a_reward_that_stays_at_zero_is_drawn(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    rows = [{"step": step, "critic/score/mean": 0.0, "actor/kl_loss": 0.0} for step in range(5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert titles(render_report([opened(folder)])) == ["Training reward"]


def test_curves_that_are_equal_everywhere_are_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    rows = [{"step": step, "perf/throughput": 1.0 + step, "perf/throughput_train": 1.0 + step} for step in range(5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (panel,) = data_of(render_report([opened(folder)]))["panels"]
    assert panel["curves"] == [["perf/throughput", "whole step; without validation"]]


def test_guards_that_are_on_are_reference_lines(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", config={"guards": {"entropy": {"low": 0.1, "high": None}}})
    panel = next(p for p in data_of(render_report([opened(folder)]))["panels"] if p["title"].startswith("Entropy"))
    assert panel["references"] == [[0.1, "guard, low"]]


def test_a_text_cannot_leave_its_script_element(run: Path) -> None:
    page = render_report([opened(run)])
    assert page.count("</script>") == page.count("<script") == 2 and "<img" not in page
    assert data_of(page)["runs"][0]["samples"][0]["groups"][0]["prompt"] == HOSTILE.replace("\ud800", "?")
    assert "default-src 'none'" in page
    assert set(re.findall(r"https?://[\w.]+", page)) == {
        "http://www.w3.org",
        "https://example.com",
    }  # SVG's name; HOSTILE


def test_a_long_run_has_a_page_of_bounded_size(tmp_path: Path) -> None:
    """1,000 steps of 20 metrics; one spike of a single step is still there."""
    folder = make_run(tmp_path / "run", steps=1)
    rows = [{"step": step, **{f"many/{n}": 1.0 + step * n for n in range(20)}} for step in range(1000)]
    rows[234]["actor/grad_norm"] = 5.0e5
    rows[235]["actor/grad_norm"] = 1.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = render_report([opened(folder)])
    data = data_of(page)["runs"][0]
    assert len(page) < 400_000 and MAX_BUCKETS / 2 <= len(data["steps"]) <= MAX_BUCKETS and data["width"] == 4
    assert max(value for value in data["metrics"]["actor/grad_norm"]["high"] if value is not None) == 5.0e5


# -- in a browser ------------------------------------------------------------------------------------------------------


def test_a_browser_shows_a_run(run: Path, browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_report([opened(run)]))
    for width in WIDTHS:
        with browser.open(path, width) as page:
            page.evaluate("document.querySelectorAll('details').forEach((made) => { made.open = true; })")
            page.settle()
            assert page.faults() == []
            assert page.evaluate("document.title") == "one" and page.evaluate("document.images.length") == 0
            text = page.text()
            assert "0.2 \u2192 0.59" in text and "40 of 40" in text and "<U+202E>back" in text and "<U+001B>" in text
            assert "guards.gradients=skip: step 7" in text and "stopped by SIGTERM" in text and "attempt 2" in text
            assert page.evaluate("document.querySelectorAll('.card').length") == 3
            assert page.evaluate("document.querySelectorAll('.plot .lost').length") == 1  # the gradient norm of step 7


def test_a_pointer_a_finger_and_a_switch_change_a_curve(run: Path, browser: Browser, tmp_path: Path) -> None:
    """The first figure is the training reward, 0.2 + 0.01 step: at its left end it is 0.2, at its right end 0.59."""
    path = tmp_path / "report.html"
    path.write_text(render_report([opened(run)]))
    with browser.open(path, DESKTOP) as page:
        assert "last" in page.text("figure .legend") and "before penalties 0.59" in page.text("figure .legend")
        page.hover("figure .plot", 0.13)
        assert "step 0" in page.text("figure .legend") and "before penalties 0.2" in page.text("figure .legend")
        page.hover("figure .plot", 0.99)
        assert "step 39" in page.text("figure .legend")
        page.click("figure .log")
        assert page.evaluate("document.querySelector('figure .log').getAttribute('aria-pressed')") == "true"
        before = page.evaluate("document.querySelectorAll('figure .plot')[0].querySelectorAll('.curve').length")
        page.click("figure .entry")
        after = page.evaluate("document.querySelectorAll('figure .plot')[0].querySelectorAll('.curve').length")
        assert after < before and page.faults() == []
    with browser.open(path, PHONE) as page:
        page.tap("figure .plot", 0.98)
        assert "step 39" in page.text("figure .legend")
        page.click(".card [data-read]")
        assert "engine 0 (p = 1), policy 0.1, difference 0.1" in page.text(".readout")


def test_two_runs_in_one_page(run: Path, browser: Browser, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", steps=25, config={"actor": {"optim": {"lr": 5e-6}}}, samples=SAMPLES)
    target = tmp_path / "new" / "both.html"
    assert main(["report", str(run), str(other), "--output", str(target)]) == 0
    for width in WIDTHS:
        with browser.open(target, width) as page:
            assert page.faults() == []
            text = page.text()
            assert "one and other" in text and "25 of 40" in text
            assert page.evaluate("document.querySelectorAll('figure')[1].querySelectorAll('.entry').length") == 2
            rows = page.evaluate("[...document.querySelectorAll('#config td')].map((cell) => cell.textContent)")
            assert rows[-3:] == ["actor.optim.lr", "1e-06", "5e-06"]  # all that differs


# -- the command -------------------------------------------------------------------------------------------------------


def test_mistakes_of_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for runs, message in (
        ([tmp_path / "none"], "there is no folder"),
        ([tmp_path], "has neither metrics.jsonl nor config.yaml: it is not the output folder of a run"),
        ([run] * 3, "a page shows one run or two, not 3"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["report", *map(str, runs), "--output", str(tmp_path / "page.html")])
        assert message in capsys.readouterr().err


def test_a_run_is_followed_while_its_files_grow(tmp_path: Path) -> None:
    """A line that is half written counts once it is whole; a resumed run's shorter file is read again."""
    folder = make_run(tmp_path / "run", steps=3)
    run = opened(folder)
    line = json.dumps({"step": 3, **metrics_of(3)}) + "\n"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line[:20])
    run.update()
    assert run.curves.last_step == 2
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line[20:])
    run.update()
    assert (run.curves.last_step, run.curves.num_rows, run.seconds_left()) == (3, 4, 360.0)  # 36 steps of 10 s
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, **metrics_of(0)}) + "\n")
    run.update()
    assert (run.curves.last_step, run.curves.num_rows) == (0, 1)
