"""The documentation: links lead somewhere, commands parse, blocks of a config are valid, every page is in the site's nav."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_megatron.cli.main import COMMANDS, find_command
from grpo_megatron.config import Config
from grpo_megatron.config.options import parse
from grpo_megatron.config.section import config_keys
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


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each command of this program in the page's blocks, without comments and placeholders."""
    for _, block in FENCE.findall(text):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            for prefix in PREFIXES:
                command = line.strip().removeprefix("$ ")
                if command.startswith(prefix):
                    words = shlex.split(command.removeprefix(prefix), comments=True)
                    yield [word for word in map(without_brackets, words) if word != "..."]


def without_brackets(word: str) -> str:
    """Of `[section.key=value ...]`, which need not be there."""
    word = word.removeprefix("[")
    return word.removesuffix("]") if word.count("]") > word.count("[") else word


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


def test_a_wrong_command_is_found() -> None:
    text = "```\npython -m grpo_megatron train a.yaml \\\n    rollout.m=3   # a comment\ngrpo-megatron convert to-mega a b\n```"
    first, second = commands(text)
    assert first == ["train", "a.yaml", "rollout.m=3"]
    with pytest.raises(AssertionError, match=r"no key 'rollout\.m'"):
        check_command(first)
    with pytest.raises(SystemExit):
        check_command(second)


# -- blocks of a config ------------------------------------------------------------------------------------------------


def config_blocks(text: str) -> Iterator[dict[str, Any]]:
    """The blocks of a page that are sections of a config."""
    for language, block in FENCE.findall(text):
        if language not in ("", "yaml"):
            continue
        try:
            raw = yaml.safe_load(block)
        except yaml.YAMLError:
            assert language != "yaml", f"a block that is marked as YAML is none:\n{block}"
            continue
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


def code_of(line: str) -> str:
    return line.partition("  # ")[0].strip()
