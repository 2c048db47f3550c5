"""Hooks of mkdocs (mkdocs.yml): what makes the pages of docs/, written for a code host, a site.

- README.md is the first page.
- A link that leaves docs/, such as ../examples/quickstart.yaml, leads to a page that shows this file or folder.
- Blocks of commands wrap at the right edge; other blocks keep their lines and scroll.
- Equations, $...$ and $$...$$, become MathML, which browsers sample themselves: no script and no font is fetched.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
SHOWN = "files"  # folder of the pages that show files of the project
LINK = re.compile(r"(!?\[[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
IMAGES = (".png", ".svg", ".jpg")
LANGUAGES = {".yaml": "yaml", ".py": "python", ".sh": "bash", ".json": "json", ".jinja": "jinja", ".lock": "text"}
LARGEST = 200_000  # bytes of a file that is shown


PROGRAMS = "grpo-megatron|python3?|make|torchrun|sbatch|sky|kubectl|docker|apptainer|enroot|hf|vllm|pip|git|bash|curl|tensorboard"
COMMAND = re.compile(rf"^(?:\$ |[A-Z_]+=\S* )*(?:[\w./-]*/)?(?:{PROGRAMS}) ", re.MULTILINE)
COMMENT = re.compile(r"(?:^|(?<=\s))# .*$", re.MULTILINE)
BLOCK = re.compile(r'<div class="highlight">(<pre>.*?</pre>)', re.DOTALL)  # of no language


def on_files(files: Files, config: Any) -> Files:
    """Add the first page, and one page for each file or folder that a page links outside docs/."""
    readme = _moved((ROOT / "README.md").read_text(encoding="utf-8"), "", "docs")
    files.append(File.generated(config, "index.md", content=readme))
    texts = [readme, *(file.content_string for file in files.documentation_pages() if file.src_uri != "index.md")]
    for name in sorted({name for text in texts for name in _outside(text)}):
        _show(name, files, config)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that leave docs/ lead to the pages that show their targets."""
    if page.file.src_uri.startswith(f"{SHOWN}/"):
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        start, target, anchor, end = match.groups()
        name = _name_outside(target)
        return match[0] if name is None else f"{start}{_place(name)}{'' if anchor is None else anchor}{end}"

    return _without_code(LINK, rewritten, markdown)


def on_page_content(html_text: str, page: Any, config: Any, files: Files) -> str:
    """The equations that arithmatex has marked, and the blocks of commands."""
    html_text = BLOCK.sub(_marked_block, html_text)
    text = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', _inline, html_text, flags=re.DOTALL)
    return re.sub(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', _block, text, flags=re.DOTALL)


def _marked_block(match: re.Match[str]) -> str:
    """A block of commands: its comments are marked, and words with hyphens, after which browsers would break the line."""
    if not COMMAND.search(html.unescape(re.sub("<[^>]*>", "", match[1]))):
        return match[0]
    words = re.sub(
        r"(<[^>]*>)|[^\s<]*-[^\s<]*", lambda word: word[1] or f'<span class="word">{word[0]}</span>', match[1]
    )
    words = COMMENT.sub(r'<span class="c1">\g<0></span>', words)
    return f'<div class="highlight commands">{words}'


def _inline(match: re.Match[str]) -> str:
    return f'<span class="formula">{convert(_latex(match[1]))}</span>'


def _block(match: re.Match[str]) -> str:
    return f'<div class="equation">{convert(_latex(match[1]), display="block")}</div>'


def _latex(marked: str) -> str:
    """The source of an equation. In text, LaTeX writes an underscore with a backslash, which the converter would keep."""
    source = html.unescape(marked).strip()
    return re.sub(r"\\text\{[^}]*\}", lambda text: text[0].replace(r"\_", "_"), source)


def on_post_build(config: Any) -> None:
    """Raise PluginError where a page would fetch something from elsewhere, or shows an equation as its source."""
    for page in Path(config.site_dir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        if found := re.search(r'<(?:script|img|iframe|link|source)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"', text):
            raise PluginError(f"{page.name} fetches something from elsewhere: {found[0]}")
        if 'class="arithmatex"' in text:
            raise PluginError(f"{page.name} has an equation that latex2mathml did not convert")


# -- links -------------------------------------------------------------------------------------------------------------


def _without_code(pattern: re.Pattern[str], replace: Any, text: str) -> str:
    """`pattern.sub` outside fenced code."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else pattern.sub(replace, part) for part in parts)


def _moved(text: str, origin: str, target: str) -> str:
    """A page of the folder `origin`, with links as from the folder `target`."""

    def rewritten(match: re.Match[str]) -> str:
        start, link, anchor, end = match.groups()
        if _is_elsewhere(link):
            return match[0]
        return f"{start}{os.path.relpath(os.path.join(origin, link), target)}{anchor or ''}{end}"

    return _without_code(LINK, rewritten, text)


def _is_elsewhere(link: str) -> bool:
    return link.startswith(("http://", "https://", "mailto:", "#", "/"))


def _outside(text: str) -> set[str]:
    """The files and folders of the project that a page of docs/ links."""
    found: set[str] = set()

    def add(match: re.Match[str]) -> str:
        if (name := _name_outside(match[2])) is not None:
            found.add(name)
        return match[0]

    _without_code(LINK, add, text)
    return found


def _name_outside(link: str) -> str | None:
    """`../examples/x.yaml` as examples/x.yaml; None for a link that stays in docs/, or that leads nowhere."""
    if _is_elsewhere(link) or not link.startswith("../"):
        return None
    name = os.path.normpath(os.path.join("docs", link))
    return name if (ROOT / name).exists() else None


def _place(name: str) -> str:
    path = ROOT / name
    if path.is_dir():
        return f"{SHOWN}/{name}/index.md"
    return f"{SHOWN}/{name}" if path.suffix in IMAGES else f"{SHOWN}/{name}.md"


# -- pages that show files ---------------------------------------------------------------------------------------------


def _show(name: str, files: Files, config: Any) -> None:
    """One file, or a folder with everything in it."""
    path, place = ROOT / name, _place(name)
    if files.get_file_from_path(place) is not None:
        return
    if path.suffix in IMAGES:
        files.append(File.generated(config, place, content=path.read_bytes()))
        return
    if path.is_dir():
        inside = sorted(entry for entry in path.iterdir() if entry.name != "__pycache__" and not entry.is_symlink())
        links = [f"- [{entry.name}]({_relative(name, entry)})" for entry in inside]
        files.append(File.generated(config, place, content="\n".join([f"# {name}/", "", *links])))
        for entry in inside:
            _show(entry.relative_to(ROOT).as_posix(), files, config)
        return
    text = path.read_text(encoding="utf-8", errors="replace")[:LARGEST]
    if path.suffix == ".md":
        content = _moved(text, str(PurePosixPath(name).parent), f"docs/{SHOWN}")
    else:
        content = f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n"
    files.append(File.generated(config, place, content=content))


def _relative(folder: str, entry: Path) -> str:
    return os.path.relpath(_place(entry.relative_to(ROOT).as_posix()), f"{SHOWN}/{folder}")
