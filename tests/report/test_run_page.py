"""The report of a run: what is drawn and what is not, hostile texts, its size, and what a browser makes of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import grpo_megatron
from grpo_megatron.cli.main import main
from grpo_megatron.report.kit import appended_step, render_report
from grpo_megatron.report.run_folder import MAX_BUCKETS, RunFolder
from grpo_megatron.untrusted import visible
from tests.browser import DESKTOP, PHONE, WIDTHS, Browser
from tests.report.material import HOSTILE, event, group, make_run, metrics_of, sample
from tests.runs import write_rows

EVENTS = [
    event("started", 0),
    event("guard", 7, "guards.gradients=skip: step 7: the gradient is not finite"),
    event("stopped", 20, f"stopped by SIGTERM after 20 steps {HOSTILE}"),
    event("resumed", 20),
]
TURN = {"kind": "assistant", "end": 2, "tokens": 2, "trained": 2, "reward": 0.25, "clock": 41, "seconds": 0.5}
ANSWER = {"kind": "observation", "end": 4, "tokens": 2, "trained": 0, "reward": None, "clock": 49, "seconds": 0.0}
DIALOGUE = [  # of three rows, the second of which the file does not have
    sample(3, 0.75, "I look a wall", turns=[TURN, ANSWER], row=1, rows=3, prompt="Where?"),
    sample(3, 0.75, "I go", turns=[{**TURN, "reward": None}], row=3, rows=3, prompt=HOSTILE),
]
SAMPLES = [
    group(
        [sample(0, 1.0, "the right answer"), sample(1, 0.0, HOSTILE), sample(2, None, failure=HOSTILE), *DIALOGUE],
        HOSTILE,
    )
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


def panels_of(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    write_rows(folder / "metrics.jsonl", rows)
    panels: list[dict[str, Any]] = data_of(render_report([opened(folder)]))["panels"]
    return panels


def test_what_is_drawn_of_few_metrics(tmp_path: Path) -> None:
    """A reward that stays at 0, curves that are equal everywhere as one, and guards that are on as reference lines."""
    folder = make_run(tmp_path / "run", config={"guards": {"entropy": {"low": 0.1, "high": None}}})
    rows = [{"step": step, "critic/score/mean": 0.0, "actor/kl_loss": 0.0, "timing_s/gen": 1.0} for step in range(5)]
    assert [panel["title"] for panel in panels_of(folder, rows)] == ["Training reward"]
    supervised = [{"step": n, "critic/score/mean": 1.0, "actor/pg_loss": 1.0 / (1 + n)} for n in range(5)]
    # the rows of a file all have the reward 1
    assert [panel["title"] for panel in panels_of(folder, supervised)] == ["Policy loss"]
    (panel,) = panels_of(
        folder, [dict.fromkeys(("step", "perf/throughput", "perf/throughput_train"), n) for n in range(5)]
    )
    assert panel["curves"] == [["perf/throughput", "whole step; without validation"]]
    taught = [f"distillation/reverse_kl{part}" for part in ("", "/maths", "/from_token_0")]
    panel, *_ = panels_of(folder, [dict.fromkeys(taught, 1.0 / (1 + step)) | {"step": step} for step in range(5)])
    assert panel["title"] == "Distance to the teacher" and panel["curves"] == [[taught[0], "reverse KL; maths"]]
    (panel,) = panels_of(folder, [{"step": step, "actor/entropy": 1.0 + step} for step in range(5)])
    assert panel["references"] == [[0.1, "guard, low"]]


def test_a_text_cannot_leave_its_script_element(run: Path) -> None:
    page = render_report([opened(run)])
    assert page.count("</script>") == page.count("<script") == 2 and "<img" not in page
    assert data_of(page)["runs"][0]["samples"][0]["groups"][0]["prompt"] == visible(HOSTILE)
    assert "default-src 'none'" in page
    assert set(re.findall(r"https?://[\w.]+", page)) == {
        "http://www.w3.org",
        "https://example.com",
    }  # SVG's name; HOSTILE


def test_a_page_of_bounded_size(tmp_path: Path) -> None:
    """1,000 steps of 20 metrics; one spike of a single step is still there. Settings and events that no reader wants are cut."""
    many = [event("guard", step, "x" * 2000) for step in range(500)]
    folder = make_run(tmp_path / "run", steps=1, config={"mine": {"text": "y" * 100_000}}, events=many)
    rows = [{"step": step, **{f"many/{n}": 1.0 + step * n for n in range(20)}} for step in range(1000)]
    rows[234]["actor/grad_norm"], rows[235]["actor/grad_norm"] = 5.0e5, 1.0
    write_rows(folder / "metrics.jsonl", rows)
    page = render_report([opened(folder)])
    data = data_of(page)["runs"][0]
    assert len(page) < 900_000 and MAX_BUCKETS / 2 <= len(data["steps"]) <= MAX_BUCKETS and data["width"] == 4
    assert max(value for value in data["metrics"]["actor/grad_norm"]["high"] if value is not None) == 5.0e5
    assert data["numEvents"] == 500


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
            assert page.evaluate("document.querySelectorAll('.card').length") == 4
            turns = page.evaluate("[...document.querySelectorAll('.card .turn')].map((turn) => turn.innerText)")
            assert turns == [
                "assistant, 2 tokens, trained, reward 0.25, engine step 41, 0.50 s\nI look ",
                "observation, 2 tokens, read only, engine step 49\na wall ",
                "assistant, 2 tokens, trained, engine step 41, 0.50 s\nI go ",
            ]
            assert "Row 1 of 3: advantage 0.25" in text and "Row 3 of 3" in text and "Where?" in text
            assert page.evaluate("document.querySelectorAll('.plot .lost').length") == 1  # the gradient norm of step 7


BARS = """[...document.querySelectorAll(".role")].map((row) =>
  [row.previousElementSibling.textContent,
   [...row.children].map((part) => [part.title, Math.round(parseFloat(part.style.width))])])"""


def test_two_roles_have_a_bar_each_on_one_time_axis(browser: Browser, tmp_path: Path) -> None:
    """A step of 1 s: training 0.75 s + 0.25 s of waiting, beside 0.5 s of sampling, which no longer adds up to 1.5 s."""
    folder = make_run(tmp_path / "run", config={"rollout": {"placement": "separate", "lag": 1}})
    times = {"step": 1.0, "gen": 0.5, "wait_weights": 0.3, "update_actor": 0.75, "wait_samples": 0.25}
    write_rows(folder / "metrics.jsonl", [{"step": n} | {f"timing_s/{k}": v for k, v in times.items()} for n in (0, 1)])
    path = tmp_path / "page.html"
    path.write_text(render_report([opened(folder)]), encoding="utf-8")
    for width in WIDTHS:
        with browser.open(path, width) as page:
            assert page.faults() == []
            assert page.evaluate(BARS) == [
                ["training ranks", [["update_actor: 0.75 s", 75], ["wait_samples: 0.25 s", 25]]],
                ["rollout ranks", [["gen: 0.50 s", 50], ["wait_weights: 0.30 s", 30], ["other: 0.20 s", 20]]],
            ]
            cells = page.evaluate('[...document.querySelectorAll("td:nth-child(3)")].map((cell) => cell.textContent)')
            assert {"75.0 %", "25.0 %", "50.0 %", "30.0 %", "20.0 %"} <= set(cells)


@pytest.mark.parametrize("steps", [40, 450], ids=["a step per place", "two steps per place"])
def test_appended_steps_are_drawn_as_those_of_a_whole_page(steps: int, browser: Browser, tmp_path: Path) -> None:
    """Three steps appended, then a line that a kill has cut off, against a page that was written with all of them."""
    paths, drawn = {"appended": tmp_path / "appended.html", "whole": tmp_path / "whole.html"}, {}
    folder = make_run(tmp_path / "run", steps=steps, total=500)
    paths["whole"].write_text(render_report([opened(folder)]))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-3]))
    rows = [appended_step(step, metrics_of(step)) for step in range(steps - 3, steps)]
    rows[-1] = rows[-1].replace("}}", ',"actor/entropy":null}}')  # the last value of a name counts: not finite
    lines[-1] = lines[-1].replace("}", ',"actor/entropy":null}')
    (folder / "metrics.jsonl").write_text("".join(lines))
    paths["whole"].write_text(render_report([opened(folder)]))
    (folder / "metrics.jsonl").write_text("".join(lines[:-3]))
    paths["appended"].write_text(render_report([opened(folder)], is_live=True) + "".join(rows) + rows[0][:90])
    for name, path in paths.items():
        with browser.open(path) as page:
            assert page.faults() == []
            drawn[name] = page.evaluate(
                "[[...document.querySelectorAll('figure path')].map((path) => path.getAttribute('d')),"
                " [...document.querySelectorAll('.legend, .tiles')].map((made) => made.textContent)]"
            )
    assert f"{steps} of 500" in drawn["whole"][1][0] and drawn["appended"] == drawn["whole"]


def test_a_page_that_grows_old_says_so(run: Path, browser: Browser, tmp_path: Path) -> None:
    """A step takes 10 s. The run's own page is suspicious after ten minutes; another page cannot know what came after it."""
    folder, path = make_run(tmp_path / "run", steps=3, config={"sft": {"steps": 5}}), tmp_path / "page.html"
    texts = []
    for is_live, age_s in ((True, 100), (True, 3600), (False, 3600)):
        page_text = render_report([opened(folder)], is_live=is_live)
        path.write_text(re.sub(r'"updated":[\d.]+', f'"updated":{time.time() - age_s}', page_text))
        with browser.open(path) as page:
            texts.append(page.text("#top p"))
    assert texts[0].startswith("running") and "(2 min ago); reload the page" in texts[0]
    assert "warm-up has a page of its own" in texts[0] and "warm-up" not in texts[2]
    assert texts[1].startswith("no sign of life") and "(60 min ago), and a step takes 10 s: it hangs" in texts[1]
    assert texts[2].startswith("running") and "ago" not in texts[2]
    (folder / "heartbeats").mkdir()
    beat = folder / "heartbeats" / "rank_00000.json"
    beat.write_text('{"phase": "step/gen", "phase_s": 2.0, "step": 3, "step_s": 4.0}')
    os.utime(beat, (1e9, 1e9))
    path.write_text(render_report([opened(folder)]))
    with browser.open(path) as page:
        assert page.text("#top p").startswith("no sign of life") and "no heartbeat since Sep 9, 2001" in page.text(
            "#top p"
        )


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
    shutil.copytree(run, tmp_path / "again" / run.name)  # of the same name: told apart by their folders
    assert main(["report", str(run), str(tmp_path / "again" / run.name), "--output", str(target)]) == 0
    with browser.open(target, WIDTHS[0]) as page:
        assert f"{run} and {tmp_path / 'again' / run.name}" in page.text()


# -- the command -------------------------------------------------------------------------------------------------------


def test_mistakes_of_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for runs, message in (
        ([tmp_path / "none"], "there is no folder"),
        ([tmp_path], "has neither metrics.jsonl nor config.yaml: it is not the output folder of a run"),
        ([run] * 3, "a page shows one run or two, not 3"),
    ):
        assert main(["report", *map(str, runs)]) == 2
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


def test_each_phase_is_explained() -> None:
    """Those that the step times, by name. Times of other kinds, such as a tool's, are no part of the stack."""
    root = Path(grpo_megatron.__file__).parent
    named = {name for path in root.rglob("*.py") for name in re.findall(r'\.phase\("(\w+)"', path.read_text("utf-8"))}
    roles = yaml.safe_load((root / "report/page/phases.yaml").read_text("utf-8"))
    explained = roles["rollout"] | roles["training"]
    assert named - {"step"} == set(explained) and all(explained.values())
    assert len(explained) == len(roles["rollout"]) + len(roles["training"])
