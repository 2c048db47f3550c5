"""The documentation: links lead somewhere, commands parse, blocks of a config are valid, every page is in the site's nav."""

from __future__ import annotations

import ast
import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.checks.components import name_problems, reward_name_problems
from grpo_megatron.cli.main import COMMANDS, find_command, main
from grpo_megatron.config import Config, MultiTurnConfig
from grpo_megatron.config.options import parse
from grpo_megatron.config.section import config_keys
from grpo_megatron.environments.pool import make_environment
from grpo_megatron.registry import find_modules
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import RewardItem
from tests.algo.inputs import make_inputs
from tests.algo.tables import make_table
from tests.files import DATA
from tests.runs import make_run, texts, write_rows
from tools.keys_page import PAGE, keys_page

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(ROOT.glob("docs/*.md"))
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
PREFIXES = ("python -m grpo_megatron ", "grpo-megatron ", ".venv/bin/python -m grpo_megatron ")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# -- links -------------------------------------------------------------------------------------------------------------


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts and the site make them."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def broken_links(name: str, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        path = (ROOT / name).parent / target if target else ROOT / name
        if not path.exists() or (anchor and anchor not in slugs(path.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name: str) -> None:
    assert broken_links(name, text_of(name)) == []


def test_every_page_is_in_the_nav_of_the_site() -> None:
    nav = re.findall(r": (\w+)\.md$", text_of("mkdocs.yml"), re.MULTILINE)
    assert len(nav) == len(set(nav))
    assert {page.stem for page in ROOT.glob("docs/*.md")} <= set(nav)


def test_the_page_of_keys_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == keys_page(), "run python -m tools.keys_page"


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) < 200


def test_the_symptoms_are_texts_of_the_program() -> None:
    """Of each quoted message in the first column, what is between dots and numbers is in the sources, joined over lines."""
    sources = [*ROOT.glob("grpo_megatron/**/*.py"), *ROOT.glob("slurm/*.sh")]
    whole = "".join(re.sub(r'"\n\s*f?"', "", path.read_text(encoding="utf-8")) for path in sources)
    quoted = [
        quote
        for row in re.findall(r"^\| (.*?) \| ", text_of("docs/troubleshooting.md"), re.MULTILINE)
        for quote in re.findall(r"`([^`]*)`", row)
    ]
    assert len(quoted) > 30
    for quote in quoted:
        parts = re.split(r"\.\.\.|'[^']*'|[\d.,]+(?: GiB)?|[():=;]|\b(?:gen|node b|SIGKILL|update)\b|->", quote)
        for part in filter(lambda text: len(text.strip()) > 9, parts):
            assert part.strip() in whole, f"{quote!r}: no file has {part.strip()!r}"


# -- commands ----------------------------------------------------------------------------------------------------------


def without_brackets(word: str) -> str:
    """Drops `[section.key=value ...]`, which need not be there."""
    word = word.removeprefix("[")
    return word.removesuffix("]") if word.count("]") > word.count("[") else word


def commands(text: str, are_marked: bool = True) -> Iterator[list[str]]:
    """The arguments of each command of this program in the page's blocks, without comments and placeholders.

    `are_marked`: also in blocks that say why they are not run.
    """
    for block in FENCE.finditer(text):
        lines = re.sub(r"\\\n\s*", "", block[2]).splitlines()
        for line in lines if are_marked or not ELSEWHERE.search(text, 0, block.start()) else ():
            for prefix in PREFIXES:
                command = line.strip().removeprefix("$ ")
                if command.startswith(prefix):
                    words = shlex.split(command.removeprefix(prefix), comments=True)
                    yield [word for word in map(without_brackets, words) if word != "..."]


ELSEWHERE = re.compile(
    r"<!-- not run here: (.+?) -->\n\Z"
)  # in the page, before a block: why no test of this file runs it
LANGUAGES = {"python", "yaml", "bash", "text"}
QUICK = ("keys", "plan", "init", "import", "examples", "convert to-megatron", "convert verify A B", "convert inspect")
MODULE = re.compile(r"# (\w+\.py)\b")  # the first line of a block that is a file


def shell_commands(block: str) -> list[str]:
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    return [line.strip().removeprefix("$ ") for line in lines if line.strip() and not line.strip().startswith("#")]


@pytest.mark.parametrize("name", NAMES)
def test_every_shell_block_is_ours_or_says_why_it_is_not_run(name: str) -> None:
    """A command of this program is parsed below; that of another program has a reason in the page."""
    text = text_of(name)
    for block in FENCE.finditer(text):
        assert block[1] in LANGUAGES, f"{block[1]!r}: a block is one of {sorted(LANGUAGES)}:\n{block[2]}"
        others = [line for line in shell_commands(block[2]) if not line.startswith(PREFIXES)]
        if block[1] == "bash" and not ELSEWHERE.search(text, 0, block.start()):
            assert not others, f"write <!-- not run here: REASON --> before the block of {others}"
        if block[1] != "bash":
            assert not any(line.startswith(PREFIXES) for line in shell_commands(block[2])), block[2]


def is_quick(words: list[str]) -> bool:
    return shlex.join(words).startswith(QUICK) or "--dry-run" in words


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if any(map(is_quick, commands(text_of(name))))])
def test_quick_commands_of_the_pages_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page, in a folder with stand-ins of the files that it names, and what its Python blocks write."""
    monkeypatch.chdir(make_run(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "outputs/quickstart/run").mkdir(parents=True)
    for model in ("MODEL_DIR", "HF_DIR", "X", "A", "B", "outputs/quickstart/run/warmup"):
        (tmp_path / model).symlink_to(tmp_path / "model")
    if name != "docs/migrating.md":  # a file of another trainer stands in a folder of this name
        (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in python_blocks(name):
        if named := MODULE.match(block):
            (tmp_path / named[1]).write_text(block)
        elif "open(" in block and NEEDS_A_RUN not in block:
            exec(compile(block, name, "exec"))
    if name == "README.md":
        for file in ("train.jsonl", "test.jsonl"):
            write_rows(tmp_path / file, [{"question": f"{n} + 1 =", "answer": f"#### {n + 1}"} for n in range(9)])
    for words in filter(is_quick, commands(text_of(name), are_marked=False)):
        if words[0] == "import":
            case = yaml.safe_load((DATA / f"imports/{words[1].replace('-', '_')}.yaml").read_text())
            words[2] = str(Path(words[2]).with_suffix(case["suffix"]))
            for file, text in (case.get("files", {}) | {words[2]: case["text"]}).items():
                Path(file).parent.mkdir(exist_ok=True)
                Path(file).write_text(text)
            Path("grpo.yaml").unlink(missing_ok=True)
        elif name == "docs/migrating.md":
            continue
        config = "examples/llama3_70b.yaml" if words[0] == "plan" else "run.yaml"
        words = [{"section.key=value": "rollout.n=4", "CONFIG.yaml": config}.get(word, word) for word in words]
        assert main(words) == 0, (words, capsys.readouterr().err)


def check_command(words: list[str]) -> None:
    """Raises SystemExit or ConfigError where the command refuses its options, AssertionError for an unknown key."""
    name, arguments = find_command(words)
    options = parse(COMMANDS[name].options, arguments)
    if name != "import":  # its overrides are keys of other trainers
        check_overrides(getattr(options, "overrides", ()))


def check_overrides(overrides: Sequence[str]) -> None:
    known = [key.name for key in config_keys(Config)]
    for override in overrides:
        key, equals, _ = override.partition("=")
        assert equals, f"{override!r} is not of the form section.key=value"
        is_known = any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for name in known)
        assert is_known or key == "section.key", f"no key {key!r} in a config"


@pytest.mark.parametrize("name", NAMES)
def test_every_command_parses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(text_of(name)):
        try:
            check_command(words)
        except SystemExit:
            pytest.fail(f"{shlex.join(words)}: {capsys.readouterr().err}")


def printed_texts() -> Iterator[tuple[str, str]]:
    """Yields (file, text) of each text in the sources of the program but docstrings, with VALUE for what is filled in."""
    for path in sorted(ROOT.glob("grpo_megatron/**/*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            values = node.values if isinstance(node, ast.JoinedStr) else [node]
            if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in parts | docstrings:
                texts = [str(one.value) if isinstance(one, ast.Constant) else "VALUE" for one in values]
                yield path.name, "".join(texts)
    yield "new_config.yaml.jinja", text_of("grpo_megatron/starting/new_config.yaml.jinja")


PRINTED = re.compile(r"(`?)(?:python -m grpo_megatron|grpo-megatron) ((?:\\\n|[^`\n])+)")


def test_every_command_in_a_message_parses() -> None:
    """Help, errors and the ends of runs. A message may name a command alone (`convert to-hf`), without what it takes."""
    seen: set[str] = set()
    for file, text in printed_texts():
        for _, line in PRINTED.findall(text):
            line = re.sub(r"\\\n\s*|(?<=--dry-run)VALUE", "", line)
            words = shlex.split(re.split(r";|    | < ", line)[0].rstrip(".,:()"), comments=True)
            if words[:1] in ([], ["VALUE"], ["COMMAND"]):
                continue
            words = ["verl" if words[0] == "import" and word == "VALUE" else word for word in words]
            seen.add(file)
            try:
                check_command(words)
            except SystemExit:
                assert len(words) <= 2 and words[0] in COMMANDS and not words[-1].startswith("-"), f"{file}: {line}"
    assert len(seen) > 9, seen


# -- blocks of a config ------------------------------------------------------------------------------------------------


def config_blocks(text: str) -> Iterator[dict[str, Any]]:
    """The blocks of a page that are sections of a config."""
    for language, block in FENCE.findall(text):
        raw = yaml.safe_load(block) if language == "yaml" else None
        if isinstance(raw, dict) and raw and set(raw) <= set(Config.model_fields):
            yield raw


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_a_config_are_valid(name: str) -> None:
    for raw in config_blocks(text_of(name)):
        Config.model_validate({**raw, "model": {"path": "model", **raw.get("model", {})}})


# -- Python blocks -----------------------------------------------------------------------------------------------------

RUN_ELSEWHERE = {"docs/python.md"}  # tests/e2e/test_examples.py runs it on a trained quickstart
NEEDS_A_RUN = "grpo_megatron.open("  # tests/test_run.py runs the README's
EXCERPT = re.compile(r"# excerpt of (\S+)\n")


def python_blocks(name: str) -> list[str]:
    return [block for language, block in FENCE.findall(text_of(name)) if language == "python"]


@pytest.mark.parametrize("name", [name for name in NAMES if python_blocks(name) and name not in RUN_ELSEWHERE])
def test_python_blocks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, in one folder. An excerpt of a file stands in this file line by line."""
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {"__name__": "block"}
    for block in (block for block in python_blocks(name) if NEEDS_A_RUN not in block):
        if excerpt := EXCERPT.match(block):
            source = {code_of(line) for line in text_of(excerpt[1]).splitlines()}
            missing = [line for line in block.splitlines()[1:] if code_of(line) not in source]
            assert not missing, f"{excerpt[1]} does not have {missing}"
        else:
            exec(compile(block, name, "exec"), values)


def test_blocks_that_are_files_are_loaded_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block `# NAME.py` is a module beside the config, in which the real checks find what the pages name. Each is called."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    find_modules(tmp_path / "run.yaml")
    raw: dict[str, Any] = {"model": {"path": "model"}}
    for name in ("README.md", "docs/extending.md", "docs/first_task.md", "docs/rewards.md"):
        for block in python_blocks(name):
            if named := MODULE.match(block):
                (tmp_path / named[1]).write_text(block)
        for section in (block for block in config_blocks(text_of(name)) if re.search(r"'my_\w+:", str(block))):
            raw |= section
    config = Config.model_validate(raw)
    problems = (*name_problems(config), *reward_name_problems(config))
    assert (texts(problems), len(config.reward.components)) == ([], 2)

    inputs, fade = make_inputs([[-1.0, -0.5]], advantages=[[1.0, 2.0]]), 1 / (1 + (0.5 / 0.2) ** 2)
    loss, metrics = policy_losses.get(config.actor.loss_mode)(inputs, config.actor)
    assert loss.tolist() == [pytest.approx([-1.0, -2 * math.exp(0.5) * fade])] and list(metrics) == ["actor/fade"]
    estimator = advantage_estimators.get(config.algorithm.adv_estimator)
    assert estimator(make_table([[1.0, 0.0, 3.0]]), config.algorithm) == [0.0, -1.0, 2.0]
    expected = {"my_rewards:score": 1, "my_batched_reward:score": 1, "my_reward:reward": 0, "mine:reward": 1}
    expected |= zip([component.function for component in config.reward.components], (1, 0), strict=True)
    chat = [{"role": "user", "content": "?"}]
    row = {"difficulty": 2, "max_words": 1}
    with RewardPool(1, 30.0) as pool:
        graded = pool.grade([RewardItem(n, "so 4", "4", messages=chat, columns=row, is_chat=True) for n in expected])
    assert [result.reward for result in graded] == list(expected.values()), graded
    environment = make_environment(MultiTurnConfig(environment="mine:Guess"))
    environment.reset({"answer": "4"}, 0)
    assert environment.step("so 4").done


def code_of(line: str) -> str:
    return line.partition("  # ")[0].strip()
