"""Text <-> tokens: a tokenizer and its end tokens, chats rendered by its template, and the tokens between a model's turns.

A tokenizer is loaded from the files of a Hugging Face folder, never from the network, and never by running its code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.processes.process import time_limit
from grpo_megatron.untrusted import ReadError, cut, path_problem, read_json, read_text, shown, special_file_in, stand_in

logger = logging.getLogger(__name__)

GENERIC_CLASSES = ("", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")  # they read tokenizer.json as it is
MAX_TEMPLATE = 1 << 20  # bytes of a chat template
# What the program and transformers give to a template.
RENDERED = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now"}
END_NAMES = ("im_end", "eot", "eos", "</s>", "end")  # of end-of-sequence tokens, the likeliest first


def load_tokenizer(path: Path | str, data: DataConfig) -> Any:
    """Load the transformers tokenizer in folder `path`, with `data.chat_template` if one is set. Never uses the network.

    Raises ConfigError: no such folder, no tokenizer in it, no end-of-sequence token, unreadable template.
    """
    if path_problem(path) or not Path(path).is_dir():
        raise ConfigError(f"tokenizer folder {str(path)!r} does not exist (model.tokenizer_path, or else model.path)")
    from transformers import AutoTokenizer, LlamaTokenizer  # takes seconds, so only where it is needed

    try:
        if problem := special_file_in(Path(path)):
            raise ReadError(f"it holds {problem}; remove it")
        loader = LlamaTokenizer if _is_sentencepiece_alone(Path(path)) else AutoTokenizer
        # False: by default it offers to run the folder's code, at a terminal
        tokenizer = loader.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # transformers raises many kinds; tokenizers a PanicException, which is no Exception
        reason = str(error).strip().partition("\n")[0][:300]
        reason = "there is none of its files" if reason.endswith("from one of: ") else reason
        for file in filter(Path.is_file, sorted(Path(path).glob("*.[jm]*"))):  # tokenizer.json, tokenizer.model
            is_object = file.suffix != ".json" or file.read_bytes().lstrip().startswith(b"{")
            if other := stand_in(file) or ("" if is_object else "no JSON object"):
                raise ConfigError(f"no tokenizer in {str(path)!r}: {file.name} is {other}") from error
        raise ConfigError(
            f"no tokenizer in {str(path)!r} ({reason}); set model.tokenizer_path to a folder with tokenizer.json"
        ) from error
    files = {"tokenizer.json", "tokenizer.model", *tokenizer.vocab_files_names.values()}
    if tokenizer.vocab_files_names and not any((Path(path) / name).exists() for name in files):
        raise ConfigError(  # transformers makes an empty tokenizer of the class that config.json stands for
            f"no tokenizer in {str(path)!r} (none of {', '.join(sorted(files))}); set model.tokenizer_path to a folder with"
            " tokenizer.json"
        )
    saved, loaded = _saved_class(Path(path)), type(tokenizer).__name__.removesuffix("Fast")
    if saved not in GENERIC_CLASSES and loaded not in (saved, *GENERIC_CLASSES):
        logger.warning(
            "the tokenizer in %r was saved as %s, and transformers loads it as %s: ids may differ",
            str(path),
            saved,
            loaded,
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(_no_end(tokenizer, Path(path)))
    if data.chat_template is not None:
        try:
            tokenizer.chat_template = read_text(data.chat_template, MAX_TEMPLATE)
        except (OSError, ReadError) as error:
            raise ConfigError(f"cannot read data.chat_template={str(data.chat_template)!r}: {error}") from error
    if data.chat_template_kwargs:
        tokenizer.chat_template = _with_values(tokenizer.chat_template, data.chat_template_kwargs)
    return tokenizer


def _with_values(template: Any, values: Mapping[str, Any]) -> str:
    """Write the values into the template, so that every prompt, the exported model and its servers have them."""
    if not isinstance(template, str):
        raise ConfigError(
            f"data.chat_template_kwargs={shown(values)}: the tokenizer has no chat template, or several by name"
        )
    names = _read_names(template)
    if unread := [name for name in values if name not in names]:
        raise ConfigError(
            f"data.chat_template_kwargs: {', '.join(map(shown, unread))} is no variable that the chat template leaves to you;"
            f" it reads {', '.join(sorted(names)) or 'none'}; leave the key out, or set data.chat_template"
        )
    lines = (
        f"{{%- set {name} = {'none' if value is None else json.dumps(value)} -%}}" for name, value in values.items()
    )
    return "".join(lines) + template


def _read_names(template: str) -> set[str]:
    """Returns the variables that a template reads, without those that the program gives. Raises ConfigError."""
    from jinja2 import Environment, TemplateError, meta

    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # transformers' tag around the model's own text
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateError as error:
        raise ConfigError(f"data.chat_template_kwargs: the chat template cannot be read ({cut(str(error))})") from error
    return meta.find_undeclared_variables(parsed) - RENDERED


def tokenizer_classes(tokenizer: Any) -> str:
    """Names the class that transformers has loaded, and the one that the folder's files were saved with, if they say so."""
    loaded, folder = type(tokenizer).__name__, tokenizer.name_or_path
    saved = _saved_class(Path(folder)) if folder else ""
    return f"saved as {saved}, loaded as {loaded}" if saved not in ("", loaded.removesuffix("Fast")) else loaded


def class_beside(config_folder: Path, tokenizer: Any) -> str:
    """Names the class that transformers and vLLM take for the files of `tokenizer` in a folder with this model's config.json.

    "" where it is the class of `tokenizer`. A model's type goes before `tokenizer_class` for some models, as for qwen2.
    """
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(str(config_folder), local_files_only=True, trust_remote_code=False)
    beside = AutoTokenizer.from_pretrained(
        tokenizer.name_or_path, config=config, local_files_only=True, trust_remote_code=False
    )
    return "" if type(beside) is type(tokenizer) else type(beside).__name__


def decoded_by_file(tokenizer: Any, text: str) -> str:
    """Tokenise and decode by tokenizer.json as it is, whatever class the folder names; without that file, return the text."""
    from transformers import PreTrainedTokenizerFast

    file = Path(tokenizer.name_or_path) / "tokenizer.json"
    if not file.exists():
        return text
    plain = PreTrainedTokenizerFast(tokenizer_file=str(file))
    return str(plain.decode(plain(text, add_special_tokens=False)["input_ids"]))


def _saved_class(folder: Path) -> str:
    """Read the class in tokenizer_config.json, without "Fast", which names the same tokenizer; "" where there is none."""
    file = folder / "tokenizer_config.json"
    return str(read_json(file).get("tokenizer_class") or "").removesuffix("Fast") if file.exists() else ""


def _no_end(tokenizer: Any, folder: Path) -> str:
    """Write the error, and its remedy, for a folder that names no end-of-sequence token, as one with tokenizer.json alone."""
    special = [token for token in tokenizer.get_added_vocab() if len(token) < 100][:12]
    likely = [token for part in END_NAMES for token in special if part in token]
    example = json.dumps({"eos_token": [*likely, *special, "</s>"][0]})
    file = folder / "tokenizer_config.json"
    text = f"the tokenizer in {str(folder)!r} has no eos_token, so no response could end; "
    text += f"add the key eos_token to {file}" if file.exists() else f"write the file {file} with the line {example}"
    text += ", where the model ends its answers with that token"
    if special:
        text += f" (special tokens here: {', '.join(special)})"
    return f"{text}. If you may not write there, copy the folder and set model.tokenizer_path to the copy"


def _is_sentencepiece_alone(folder: Path) -> bool:
    """Tell whether the folder has SentencePiece's tokenizer.model of Llama's kind, and nothing that names a tokenizer class.

    AutoTokenizer then takes a class that leaves out the space before the first word: other ids than SentencePiece's own.
    """
    if not (folder / "tokenizer.model").exists():
        return False
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return False
    config = folder / "config.json"
    return not config.exists() or read_json(config).get("model_type") in ("llama", "mistral", "mixtral")


# -- End tokens: one rule for training, validation, evaluation, generation and export -----------------------------------
# An answer ends with the tokenizer's end-of-sequence token, or with any `eos_token_id` of config.json and of
# generation_config.json. A chat model often has several. Llama 3 Instruct: 128001 <|end_of_text|>, 128008 <|eom_id|> and
# 128009 <|eot_id|>. A server stops at all of them, so a policy has to be trained with all of them.

GENERATION_FILE = "generation_config.json"
EOS_KEY = "eos_token_id"


@dataclass(frozen=True)
class EndTokens:
    """The tokens that end an answer. `sources`: token id -> where it comes from, in ascending order of the ids."""

    sources: dict[int, tuple[str, ...]]

    @property
    def ids(self) -> list[int]:
        """The token ids, ascending."""
        return list(self.sources)

    def lines(self, tokenizer: Any) -> Iterator[str]:
        """Yield one line per token: id, text, and where it comes from."""
        for token, sources in self.sources.items():
            yield f"{token} {tokenizer.decode([token])!r} ({', '.join(sources)})"


def read_end_tokens(tokenizer: Any, model_folder: Path, vocab_size: int | None = None) -> EndTokens:
    """Read the end tokens of a model with this tokenizer. `model_folder` has config.json, and perhaps generation_config.json.

    `vocab_size`: rows of the embedding. Raises ConfigError for a file that cannot be read, and for a value that is no token.
    """
    sources: dict[int, list[str]] = {tokenizer.eos_token_id: ["tokenizer"]}
    for name in ("config.json", GENERATION_FILE):
        path = model_folder / name
        if not path.exists():
            continue
        for token in _tokens_of(path, vocab_size):
            sources.setdefault(token, []).append(name)
    return EndTokens({token: tuple(sources[token]) for token in sorted(sources)})


def _tokens_of(path: Path, vocab_size: int | None) -> list[int]:
    """Read the end tokens that a file names, each once."""
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); correct or remove it") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object; correct or remove it")
    value = config.get(EOS_KEY)
    tokens = [token for token in (value if isinstance(value, list) else [value]) if token is not None]
    for token in tokens:
        if type(token) is not int or token < 0 or (vocab_size is not None and token >= vocab_size):
            ids = "a token id" if vocab_size is None else f"a token id below the vocabulary's {vocab_size}"
            raise ConfigError(f"{path}: {EOS_KEY} holds {shown(token)}, which is not {ids}; correct it")
    return list(dict.fromkeys(tokens))


# -- Chat templates: programs that come with a model, and may loop or build a text of gigabytes --------------------------

TEMPLATE_S = 2.0  # processor seconds for one chat; a usual one takes a millisecond, and the first some 0.1 s to compile
TEMPLATE_BYTES = 2 << 30  # that one chat may add to the memory
MAX_RENDERED = 1 << 24  # characters of one chat


@contextlib.contextmanager
def _memory_limit(size: int) -> Iterator[None]:
    """Allow the process to map `size` bytes more than it has mapped. No limit where /proc does not tell that."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + size
    except OSError:
        yield
        return
    bounds = [bound for bound in (limit, *before) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    where: str,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    generate: bool = True,
) -> str:
    """Render by the tokenizer's chat template `messages` and the tools' JSON schemas.

    `generate`: up to the beginning of the assistant's turn. Raises ConfigError when the template fails or takes too long;
    `where` names the row in the message.
    """
    try:
        options = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": generate}
        with time_limit(TEMPLATE_S, "it"), _memory_limit(TEMPLATE_BYTES):  # the first one works on the main thread only
            text = str(tokenizer.apply_chat_template(list(messages), **options))
    except MemoryError as error:
        raise ConfigError(f"the chat template fails on {where}: it takes {TEMPLATE_BYTES >> 30} GiB or more") from error
    except Exception as error:  # whatever the template raises
        reason = cut(f"{type(error).__name__}: {error}", 500)
        raise ConfigError(f"the chat template fails on {where}: {reason}") from error
    if len(text) > MAX_RENDERED:
        raise ConfigError(
            f"the chat template makes {len(text):,} characters of {where}; at most {MAX_RENDERED:,} are accepted"
        )
    return text


# -- Tokens between the model's turns ----------------------------------------------------------------------------------
# The model's own tokens are never decoded and encoded again. What an environment answers is rendered as the difference of
# two renderings of a stand-in conversation:
#
# ended = template([question, stand-in])                 gives  QUESTION STAND-IN<|im_end|>
# next = template([question, stand-in, *answers], add_generation_prompt=True)
# gives  QUESTION STAND-IN<|im_end|> ANSWERS <|im_start|>assistant
# observation = what `next` has after STAND-IN, without the end-of-turn token that the model has written itself
#
# So an observation depends on the answers only, and a trajectory's tokens are the prompt, then in turn what the model wrote
# and what was observed. This equals the template's own rendering of the whole conversation if the template does not
# change a turn when others follow it. `TurnRenderer.check` finds templates that do: Qwen3's drops the thoughts of earlier
# turns. Those render the whole conversation before each turn (`TurnRenderer.whole`). Where its text goes on from what the
# model has read and written, the rest is an observation. Elsewhere a new row begins, whose prompt is the whole.

logger = logging.getLogger(__name__)

QUESTION = {"role": "user", "content": "first question"}
STAND_IN = "stand-in answer"
THINKING_STAND_IN = f"<think>\nstand-in thought\n</think>\n\n{STAND_IN}"
MARKER = "observed marker"
STABLE_CHATML = "examples/templates/chatml_tools.jinja"

# A mark of the family in its template -> what to do when the template changes earlier turns.
REMEDIES = {
    "<|im_start|>": (
        f"Qwen and other ChatML models: set data.chat_template={STABLE_CHATML}, which keeps earlier <think> blocks"
    ),
    "<|start_header_id|>": "Llama 3: set data.chat_template to a copy without the lines that change earlier turns",
    "[INST]": "Mistral, Llama 2: set data.chat_template to the tool template of a later Mistral release, or to a copy",
    "<start_of_turn>": "Gemma: its template knows the roles user and assistant only; let the environment answer as user",
    "Assistant\uff5c>": "DeepSeek: set data.chat_template to a copy that keeps the text before </think>",
}


class RewritingTemplateError(ConfigError):
    """The chat template changes earlier turns."""


class TurnRenderer:
    """A renderer of prompts and observations as token ids.

    `tools` are the JSON schemas that the template shows. `end_token_ids` are those of `EndTokens`; the tokenizer's own is
    always one of them. `stop_token_ids` are the engine's further stop tokens, which belong to the text of a turn. `where`
    names the user of this renderer in messages. `rewrites`: the template changes earlier turns, as `check` has found out.
    """

    rewrites = False

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        where: str = "rollout.multi_turn",
        stop_token_ids: Sequence[int] = (),
        end_token_ids: Sequence[int] = (),
    ) -> None:
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"{where}: turns are rendered by a chat template, and the tokenizer has none; set data.chat_template to"
                f" a Jinja file (ChatML: {STABLE_CHATML})"
            )
        self.tokenizer, self.where = tokenizer, where
        self.tools = [dict(tool) for tool in tools]
        self.end_token_ids = {tokenizer.eos_token_id, *end_token_ids}
        self.stop_token_ids = self.end_token_ids | set(stop_token_ids)
        self._checked = set[str]()  # roles

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Render the first messages, up to the beginning of the assistant's turn. Raises ConfigError.

        `tools`: instead of the renderer's own.
        Text that looks like a special token is broken up in them. Marks of tool calls are not: the messages may explain them.
        """
        safe = [_broken_up(message, self._special_tokens) for message in messages]
        shown = [dict(tool) for tool in tools] or self.tools
        return self._encode(render_chat(_with_call_ids(safe), self.tokenizer, self.where, shown, generate=True))

    def answered(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Break control tokens in an environment's message up: each gets a space after its first character.

        Control tokens are the special ones, and the template's own that are no text of a language: `<tool_call>`.
        """
        safe: dict[str, Any] = _broken_up(message, self._control_tokens)
        return safe

    def observation(self, messages: Sequence[Mapping[str, Any]], *, ended_with_eos: bool) -> list[int]:
        """Render what stands between the end of the assistant's turn and the beginning of its next one.

        `ended_with_eos`: the last generated token is `end_of_turn`. Otherwise the observation begins with that token:
        the turn was cut, or ended by a stop text. The messages are those of `answered`, so an environment's answer cannot
        begin or end a turn, or call a tool. Raises ConfigError when the template fails or changes earlier turns.
        """
        ids = self._encode(self._after_turn([self.answered(message) for message in messages]))
        return ids[self._length_of_end(ids) :] if ended_with_eos else ids

    @cached_property
    def opening(self) -> str:
        """The beginning of the assistant's text that the prompt has written for it: an open <think>, or nothing."""
        _, mark, text = self._before.rpartition("<think>")
        return mark + text if mark and "</think>" not in text else ""

    @cached_property
    def turn_ends(self) -> set[int]:
        """The tokens that end a turn and are no part of its text."""
        with contextlib.suppress(ConfigError):  # GLM: the token that begins the next turn ends this one
            return {*self.end_token_ids, self.end_of_turn}
        return self.end_token_ids

    def whole(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], read: str, end: int | None
    ) -> tuple[list[int], str, bool]:
        """Render a conversation up to the assistant's next turn, as (token ids, text, goes on).

        `read`: what the model has read and written so far, as text; `end`: the token that has ended its turn, if it wrote one.
        Where the text goes on from these, the ids are what follows, as in `observation`. Otherwise they are a whole prompt.
        The messages are safe (`answered`), or the assistant's.
        """
        safe = [_broken_up(message, self._special_tokens) for message in messages]
        shown = [dict(tool) for tool in tools] or self.tools
        text = render_chat(_with_call_ids(safe), self.tokenizer, self.where, shown, generate=True)
        if read and text.startswith(read):
            ids = self._encode(text[len(read) :])
            with contextlib.suppress(ConfigError):
                length = self._length_of_end(ids)
                if end in (None, ids[length - 1]):
                    return ids[length:] if end is not None else ids, text, True
        return self._encode(text), text, False

    @cached_property
    def end_of_turn(self) -> int:
        """The token with which the template ends the assistant's turn. Raises ConfigError: generation does not stop there."""
        ids = self._encode(self._ended.rpartition(STAND_IN)[2])
        return ids[self._length_of_end(ids) - 1]

    def assistant_text(self, message: Mapping[str, Any]) -> str:
        """Render the text that the model should generate for a given assistant message, without the end-of-turn token.

        A message without tool calls is its content. Tool calls in OpenAI's form are written as the template writes them.
        Raises ConfigError when it does not write them.
        """
        content = message.get("content") or ""
        if not message.get("tool_calls"):
            return str(content)
        [message] = _with_call_ids([message])
        before = self._before
        text = self._render([QUESTION, message], generate=False)
        names = [call.get("function", call).get("name", "") for call in message["tool_calls"]]
        if not text.startswith(before) or any(str(name) not in text[len(before) :] for name in names):
            raise ConfigError(
                f"{self.where}: the chat template does not write tool_calls in the assistant's turn; write the calls into"
                " its content, or set data.chat_template to a template with tools"
            )
        return text[len(before) :].rpartition(self.tokenizer.decode([self.end_of_turn]))[0]

    def check(self, role: str | None = None, *, may_rewrite: bool = False) -> None:
        """Raise ConfigError for a template with which a trajectory would not be what the template makes of it.

        `role` is that of the environment's answers; default: "tool" with tools, otherwise "user". `may_rewrite`: a
        template that changes earlier turns sets `rewrites`. A role is checked once.
        """
        role = role or ("tool" if self.tools else "user")
        if role in self._checked:
            return
        try:
            self._check(role)
        except RewritingTemplateError:
            if not may_rewrite:
                raise
            self.rewrites = True
            self._check_whole(role)
        if not self._checked:
            self._warn_of_hidden_tools(self._before)
        self._checked.add(role)

    def _check_whole(self, role: str) -> None:
        [answer] = _with_call_ids([{"role": role, "content": MARKER}])
        text = self._render([QUESTION, _assistant(STAND_IN), answer], generate=True)
        header, shown, rest = text.partition(STAND_IN)
        if not shown or MARKER not in rest:
            raise self._refusal(f"shows nothing of an answer, or of a message with role {role!r}")
        self._length_of_end(self._encode(rest))
        begins = next((token for token in self._special_tokens if token in header[len(self._before) :]), None)
        if begins:
            raise self._refusal(f"writes {begins} before the assistant's text, and the model writes it as text")

    def _check(self, role: str) -> None:
        if "strftime_now" in str(self.tokenizer.chat_template):
            raise ConfigError(
                f"{self.where}: the chat template writes today's date (strftime_now), so a resumed run would have other"
                " prompts; Llama 3.2 and others: set data.chat_template to a copy with a fixed date"
            )
        before, ended = self._before, self._ended
        if ended.endswith(STAND_IN):
            raise self._refusal("ends the assistant's turn with nothing", rewrites=True)
        self.end_of_turn  # noqa: B018 - raises for a template that ends the turn otherwise
        turns = [QUESTION, _assistant(self._stand_in)]
        if not ended.startswith(before):
            raise self._refusal("begins an assistant turn in another way than the prompt for it ends", rewrites=True)
        if self._stand_in not in ended[len(before) :]:
            raise self._refusal("drops or changes the <think> block of the assistant's turn", rewrites=True)
        [answer] = _with_call_ids([{"role": role, "content": MARKER}])
        try:
            self._render([*turns, answer], generate=True)
        except ConfigError as error:
            raise self._refusal(f"fails on a message with role {role!r} ({error.__cause__})") from error
        tail = self._after_turn([answer])
        if MARKER not in tail:
            raise self._refusal(f"shows nothing of a message with role {role!r}")
        space = ended[len(before) :].partition(self._stand_in)[0]  # Mistral: an answer begins with a space
        text = self._render([*turns, answer, turns[-1], answer], generate=True)
        if not text.endswith(tail + space + self._stand_in + tail):
            raise self._refusal("changes earlier turns when others follow them", rewrites=True)

    def _after_turn(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render what follows the stand-in's text, from the end-of-turn token to the beginning of the next turn."""
        turns = [QUESTION, _assistant(self._stand_in), *_with_call_ids(messages)]
        text = self._render(turns, generate=True)
        before, stand_in, _ = self._ended.rpartition(self._stand_in)
        start = len(before) + len(stand_in)
        if not text.startswith(self._ended[:start]):
            raise self._refusal("changes earlier turns when others follow them", rewrites=True)
        return text[start:]

    def _length_of_end(self, ids: Sequence[int]) -> int:
        """Count the tokens that end the turn at the beginning of `ids`: white space, and the first stop token."""
        for place, token in enumerate(ids):
            if token in self.stop_token_ids:
                return place + 1
            if self.tokenizer.decode([token]).strip():
                break
        stops = [f"{token} ({self.tokenizer.decode([token])!r})" for token in sorted(self.stop_token_ids)]
        end, remedy = "nothing", "write a token that stops it behind the assistant's content in the template"
        if ids:
            end = f"token {ids[0]} ({self.tokenizer.decode([ids[0]])!r})"
            remedy = "add it to rollout.stop_token_ids, or make it the tokenizer's eos_token"
        raise ConfigError(
            f"{self.where}: the chat template ends the assistant's turn with {end}, and generation stops at"
            f" {', '.join(stops)}; {remedy}"
        )

    @cached_property
    def _before(self) -> str:
        """The prompt of the stand-in conversation."""
        return self._render([QUESTION], generate=True)

    @cached_property
    def _ended(self) -> str:
        """The stand-in conversation after the assistant's turn."""
        return self._render([QUESTION, _assistant(self._stand_in)], generate=False)

    @cached_property
    def _stand_in(self) -> str:
        return THINKING_STAND_IN if "</think>" in str(self.tokenizer.chat_template) else STAND_IN

    @cached_property
    def _special_tokens(self) -> list[str]:
        """The special tokens, longest first, so that none is broken up as a part of another."""
        texts = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        return sorted(texts | set(self.tokenizer.all_special_tokens), key=len, reverse=True)

    @cached_property
    def _control_tokens(self) -> list[str]:
        added, template = map(str, self.tokenizer.added_tokens_decoder.values()), str(self.tokenizer.chat_template)
        marks = {token for token in added if re.fullmatch(r"[<\[].+[>\]]", token) and token in template}
        return sorted(marks.union(self._special_tokens), key=len, reverse=True)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _render(self, messages: Sequence[Mapping[str, Any]], *, generate: bool) -> str:
        return render_chat(list(messages), self.tokenizer, self.where, self.tools, generate=generate)

    def _refusal(self, what: str, *, rewrites: bool = False) -> ConfigError:
        template = str(self.tokenizer.chat_template)
        reason = ", so the model would be trained on other tokens than it is served with later" if rewrites else ""
        remedy = next((text for mark, text in REMEDIES.items() if mark in template), None)
        remedy = remedy or f"set data.chat_template to a template that does not (ChatML: {STABLE_CHATML})"
        error = RewritingTemplateError if rewrites else ConfigError
        return error(f"{self.where}: the chat template {what}{reason}. {remedy}")

    def _warn_of_hidden_tools(self, prompt: str) -> None:
        names = [str(tool.get("function", tool).get("name")) for tool in self.tools]
        if hidden := ", ".join(name for name in names if name not in prompt):
            text = "it must know them from its training, or from data.system_prompt"
            logger.warning(
                "%s: the chat template does not show the model these tools: %s; %s", self.where, hidden, text
            )


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _with_call_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give ids to tool calls and their results where they have none, and the calls' arguments as objects.

    Mistral's templates refuse ids that are not nine letters or digits. Llama's would write arguments that are a JSON text
    (OpenAI's form) as a string within a string.
    """
    numbered: list[dict[str, Any]] = []
    for message in map(dict, messages):
        if message.get("tool_calls"):
            message["tool_calls"] = [_normal_call(call, index) for index, call in enumerate(message["tool_calls"])]
        if message.get("role") == "tool" and not message.get("tool_call_id"):
            message["tool_call_id"] = f"{sum(other.get('role') == 'tool' for other in numbered):09d}"
        numbered.append(message)
    return numbered


def _normal_call(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    function = dict(call.get("function", call))
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"])
    return {"type": "function", "id": call.get("id") or f"{index:09d}", "function": function}


def _broken_up(value: Any, tokens: Sequence[str]) -> Any:
    """Put a space after the first character of each of `tokens` in all texts of a message, or of a part of one."""
    if isinstance(value, str):
        for token in tokens:
            value = value.replace(token, f"{token[:1]} {token[1:]}")
    elif isinstance(value, Mapping):
        return {name: _broken_up(part, tokens) for name, part in value.items()}
    elif isinstance(value, list):
        return [_broken_up(part, tokens) for part in value]
    return value
