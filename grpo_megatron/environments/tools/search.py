"""Tools that look something up: `search` in a local corpus, `remote` at an HTTP endpoint."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from grpo_megatron.data.rows import read_rows, text_field
from grpo_megatron.environments.tool import ToolError, tools
from grpo_megatron.processes.endpoint import EndpointError, ServiceReply, check_url, key_of, post_json

TOKEN = re.compile(r"\w+")


class Corpus:
    """The passages of a data file, and their index. Raises ConfigError.

    A row is {"title": ..., "text": ...}; the title may be left out. Ranked by BM25 (Robertson and Zaragoza 2009, k1 =
    1.5, b = 0.75; the library bm25s). Equal scores keep the order of the file.
    """

    def __init__(self, path: str) -> None:
        import bm25s

        self.passages = read_rows(path, _passage)
        self._index = bm25s.BM25(method="lucene", backend="numpy")
        self._index.index([_tokens(passage) for passage in self.passages], show_progress=False)

    def best(self, query: str, count: int) -> list[str]:
        """Returns at most `count` passages that share a word with the query, best first."""
        words = [word for word in _tokens(query) if word in self._index.vocab_dict]
        if not words:
            return []
        scores = self._index.get_scores(words)
        best = (-scores).argsort(kind="stable")[:count]
        return [self.passages[int(number)] for number in best if scores[number] > 0]


@functools.cache
def load_corpus(path: str) -> Corpus:
    """Loads a corpus once per worker."""
    return Corpus(path)


def build_index(*, corpus: str, top_k: int = 3, max_characters: int = 600) -> None:
    """Builds the index before the processes of trajectories are forked, which then share it."""
    load_corpus(corpus)


@tools.register("search", preload=build_index)
def search(query: str, *, corpus: str, top_k: int = 3, max_characters: int = 600) -> str:
    """Search a collection of documents and return the passages that match best.

    Args:
        query: Words to search for.
    """
    passages = [passage[:max_characters] for passage in load_corpus(corpus).best(query, top_k)]
    return "\n\n".join(f"[{number}] {passage}" for number, passage in enumerate(passages, 1)) or "No passage matches."


def _passage(row: dict[str, Any]) -> str:
    text = text_field(row, "text")
    return f"{text_field(row, 'title', empty=True)}: {text}" if row.get("title") else text


def _tokens(text: str) -> list[str]:
    return [str(word) for word in TOKEN.findall(text.lower())]


@tools.register("remote")
def remote(
    query: str,
    *,
    url: str,
    retries: int = 4,
    deadline_s: float = 20.0,
    headers: dict | None = None,
    api_key_env: str | None = None,
) -> str:
    """Ask a remote service.

    Args:
        query: The question or command for the service.
    """
    check_url(url, "remote: url")
    key = key_of(api_key_env, "remote: api_key_env")
    body = json.dumps({"query": query}).encode()
    try:
        return _text(post_json(url, body, headers or {}, retries, deadline_s, key))
    except EndpointError as error:
        raise ToolError(str(error)) from error


def _text(response: ServiceReply) -> str:
    """Returns the text for the model: of application/json with a text "result", that text."""
    text = response.data.decode("utf-8", "replace")
    if response.headers.get_content_type() == "application/json":
        value = json.loads(text)
        if isinstance(value, dict) and isinstance(value.get("result"), str):
            return str(value["result"])
    return text
