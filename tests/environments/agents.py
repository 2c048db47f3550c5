"""Programs that ask the model by the client of OpenAI, each by its name: `python agents.py NAME`, or the function `main`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from openai import APITimeoutError, BadRequestError, NotFoundError, OpenAI

CLIENT: OpenAI
ROW: dict[str, Any]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hello"}
Said = list[dict[str, Any]]


def ask(messages: Said, **options: Any) -> Any:
    return CLIENT.chat.completions.create(model="policy", messages=messages, **options)  # type: ignore[call-overload]


def two_turns() -> dict[str, Any]:
    """Uses a tool; the second request has the answer as the client returned it."""
    first = ask([USER], tools=[TOOL], max_tokens=7).choices[0]
    call = first.message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": call.function.arguments}
    second = ask([USER, first.message, result], tools=[TOOL], stop=["END"], logprobs=True).choices[0]
    scores = [(token.token, token.logprob) for token in second.logprobs.content]
    seen = [first.finish_reason, first.message.content, second.message.content, scores]
    print(json.dumps(seen), file=sys.stderr)
    return {"reward": 0.5, "metrics": {"turns": 2, "row": ROW["row"]["x"], "seen": float(len(str(seen)))}}


def streams() -> float:
    """The model is listed, found by its name, and streams; the last chunk has the usage alone."""
    assert [CLIENT.models.retrieve(one.id).id for one in CLIENT.models.list()] == ["policy"]
    *chunks, last = ask([USER], stream=True, stream_options={"include_usage": True})
    usage = (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], 9, 2)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return float(text == "one" and usage and not any(chunk.usage for chunk in chunks))


def responses() -> float:
    """Continues by the id of the response before, and then by the full list of items."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    first = CLIENT.responses.create(model="policy", input="hello", instructions="be brief", tools=[tool])  # type: ignore
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    common: dict[str, Any] = {"model": "policy", "tools": [tool]}
    second = CLIENT.responses.create(**common, previous_response_id=first.id, input=[result])
    items = [USER, *(item.model_dump() for item in first.output), result]
    items += [item.model_dump() for item in second.output] + [{"role": "user", "content": "again"}]
    third = CLIENT.responses.create(**common, instructions="be brief", input=items, stream=True)
    text = "".join(event.delta for event in third if event.type == "response.output_text.delta")
    return float((call.name, second.output_text, text) == ("f", "two", "three"))


def messages() -> float:
    """Anthropic's client: a tool, its result beside a text, and a stream that a stop text ends."""
    from anthropic import Anthropic

    client, model = Anthropic(max_retries=0), os.environ["ANTHROPIC_MODEL"]
    tool: Any = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    common: dict[str, Any] = {"model": model, "system": "be brief", "max_tokens": 7, "tools": [tool]}
    first = client.messages.create(**common, messages=[USER])
    text, call = first.content
    assert (text.text, call.input, first.stop_reason) == ("I look.", {"y": 1}, "tool_use")  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}  # type: ignore[union-attr]
    said: list[Any] = [USER, {"role": "assistant", "content": first.content}]
    said.append({"role": "user", "content": [result, {"type": "text", "text": "and?"}]})
    with client.messages.stream(**common, messages=said, stop_sequences=["END"]) as stream:
        texts, second = "".join(stream.text_stream), stream.get_final_message()
    assert (second.stop_reason, second.stop_sequence, second.usage.input_tokens) == ("stop_sequence", "END", 9), second
    with client.messages.stream(
        **common, messages=[*said, {"role": "assistant", "content": second.content}, USER]
    ) as s:
        [last] = s.get_final_message().content
    return float((texts, last.name, last.input) == ("so 1 ", "f", {"y": 1}))  # type: ignore[union-attr]


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def _picture(encoded: str, detail: str = "auto") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}", "detail": detail}}


def pictures() -> float:
    """A picture in a question and one in the result of a tool."""
    picture = _picture(PNG, "high")
    question = {"role": "user", "content": [{"type": "text", "text": "hello"}, picture]}
    first = ask([question], tools=[TOOL]).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": [picture]}
    return float(ask([question, first, result], tools=[TOOL]).choices[0].message.content == "so")


def several() -> float:
    """Asks for two answers, and goes on with the last one."""
    asked = ask([USER], n=2, seed=7)
    assert [choice.index for choice in asked.choices] == [0, 1], asked
    assert (asked.usage.prompt_tokens, asked.usage.completion_tokens, asked.usage.total_tokens) == (9, 4, 13), asked
    first, second = (choice.message for choice in asked.choices)
    third = ask([USER, second, USER]).choices[0].message
    return float([first.content, second.content, third.content] == ["one", "two", "three"])


def completions() -> float:
    first = CLIENT.completions.create(model="policy", prompt="ab", max_tokens=3).choices[0].text
    second = CLIENT.completions.create(model="policy", prompt=f"ab{first}cd").choices[0].text
    return float((first, second) == ("one", "two"))


def token_ids() -> float:
    first = CLIENT.completions.create(model="policy", prompt=[1, 2], logprobs=1).choices[0]  # type: ignore[arg-type]
    second = CLIENT.completions.create(model="policy", prompt=[1, 2, 5, 6, 3]).choices[0].text
    return float((first.logprobs.token_logprobs, second) == ([-0.5, -0.25], "two"))  # type: ignore[union-attr]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # option -> a part of the message
    "model": ({"model": "gpt"}, "the only model here is 'policy'"),
    "top_p": ({"top_p": 0.9}, "leave it out, or set 1"),
    "temperature": ({"temperature": 0.2}, "leave it out, or set 1.0"),
    "n": (
        {"n": 2},
        "n=2: each further answer begins a sequence, and they are not recorded. Branches are recorded with",
    ),
    "no answer": ({"n": 0}, "n=0: leave it out, or set 1 or more"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 3}, "of the generated tokens only"),
    "chat_template_kwargs": (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        "the run renders the messages",
    ),
    "structured_outputs": ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "it is not read here; leave it out"),
    "seed": ({"seed": "2"}, "TurnRequest.seed is str"),
    "no seed": ({"seed": True}, "seed=True: no whole number"),
    "logit_bias": ({"logit_bias": {"1": 2}}, "logit_bias"),
    "video": ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "only text is read"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/a.png"}}]}]},
        "an image is 'http://x/a.png'; only data:image/...;base64,... is read, and nothing is fetched",
    ),
    "detail": (
        {"messages": [{"role": "user", "content": [_picture(PNG, "low")]}]},
        "the model's processor decides the size",
    ),
    "corrupt": ({"messages": [{"role": "user", "content": [_picture("aGVsbG8=")]}]}, "an image (5 bytes) is no PNG"),
    "stop": ({"stop": [""]}, "stop: at most 16"),
    "max_tokens": ({"max_tokens": 0}, "at least 1"),
    "no message": ({"messages": []}, "there is no message"),
    "tool_choice": ({"tool_choice": "required"}, "tool_choice"),
}
AFTERWARDS: dict[str, tuple[dict[str, Any], str]] = {
    "rewritten": ({"messages": [{"role": "user", "content": "Hello"}, USER]}, "message 0 is another one"),
    "nothing new": ({"messages": [USER]}, "message 0"),
    "repeated": ({"messages": [USER, {"role": "assistant", "content": "one"}]}, "nothing follows"),
    "other answer": ({"messages": [USER, {"role": "assistant", "content": "two"}, USER]}, "message 1 is another one"),
    "other tools": (
        {"messages": [USER, {"role": "assistant", "content": "one"}, USER], "tools": [TOOL]},
        "tools differ",
    ),
}


def _refusals(cases: dict[str, tuple[dict[str, Any], str]]) -> list[str]:
    wrong = []
    for name, (options, part) in cases.items():
        try:
            CLIENT.chat.completions.create(**{"model": "policy", "messages": [USER], **options})
        except BadRequestError as error:
            if part not in str(error):
                wrong.append(f"{name}: {error}")
        else:
            wrong.append(f"{name}: accepted")
    return wrong


def refused() -> float:
    """Checks that what is refused leaves the trajectory as it was."""
    wrong = _refusals(REFUSED)
    ask([USER], temperature=1.0, top_p=1.0, n=1)
    wrong += [text for text in _refusals(AFTERWARDS) if not text.startswith("nothing new")]
    print(wrong, file=sys.stderr)
    return float(not wrong)


def forged() -> float:
    url = CLIENT.base_url
    try:
        CLIENT.models.retrieve("gpt")
    except NotFoundError:
        assert "the only one here is 'policy'" in str(sys.exc_info()[1])
    try:
        OpenAI(base_url=str(url).replace("/t/", "/t/x"), max_retries=0).models.list()
    except NotFoundError:
        return float(ask([USER]).choices[0].message.content == "one")
    return 0.0


def impatient() -> float:
    """Hangs up; the same request again gets the answer."""
    body = json.dumps({"model": "policy", "messages": [USER]}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{CLIENT.base_url}chat/completions", body, headers)
    try:
        urllib.request.urlopen(request, timeout=0.3)
    except (TimeoutError, urllib.error.URLError):
        with urllib.request.urlopen(request) as answer:
            return float(json.load(answer)["choices"][0]["message"]["content"] == "one")
    return 0.0


def rewrites() -> float:
    """Its second request has another history, with other tools; its third goes on from there."""
    ask([USER])
    other = {"role": "user", "content": "shorter"}
    second = ask([other], tools=[TOOL]).choices[0].message
    third = ask([other, second, USER], tools=[TOOL]).choices[0].message
    return float((second.content, third.content) == ("two", "three"))


def _send_half() -> None:
    """Sends a request and leaves in the middle of its body."""
    url = CLIENT.base_url
    with socket.create_connection((url.host, url.port or 80)) as half:
        half.sendall(f"POST {url.path}chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())


def leaves() -> float:
    """Asks, and does not read the answer."""
    _send_half()
    try:
        CLIENT.with_options(timeout=0.3).chat.completions.create(model="policy", messages=[USER])  # type: ignore
    except APITimeoutError:
        return 1.0
    return 0.0


def hangs_later() -> None:
    ask([USER])
    time.sleep(1000)


def lists() -> None:
    """Sends a flood of requests that are answered."""
    ask([USER])
    while True:
        CLIENT.models.list()


def large() -> float:
    ask([{"role": "user", "content": "x" * (100 << 20)}])
    return 0.0


def flood() -> float:
    while True:
        _refusals({"n": REFUSED["n"]})


def both_at_once() -> float:
    threading.Thread(target=ask, args=([USER],)).start()
    time.sleep(1)
    ask([USER, USER])
    return 0.0


def leaves_a_child() -> float:
    """Ends while a child of it has the pipes open, with a reward that has been printed."""
    ask([USER])
    subprocess.Popen(["sleep", "1000"])
    return 1.0


def stays() -> dict[str, Any]:
    """Each trajectory is a conversation of its own at the same address."""
    ask([USER])
    return {"reward": float(ROW["seed"]), "metrics": {"process": os.getpid()}}


def silent() -> float:
    return 1.0


def hangs() -> float:
    time.sleep(1000)
    return 1.0


def crashes() -> float:
    ask([USER])
    os.abort()


def raises() -> float:
    ask([USER])
    return 1 / 0


def talks() -> float:
    ask([USER])
    print("x" * (2 << 20))
    return 1.0


def no_reward() -> Any:
    ask([USER])
    return "good"


def main() -> None:
    """Plays the agent of the last argument."""
    global CLIENT, ROW
    CLIENT = OpenAI(max_retries=0)
    for line in sys.stdin:  # one, unless `episodes` are several
        ROW = json.loads(line)
        print(json.dumps(globals()[sys.argv[-1]]()), flush=True)


if __name__ == "__main__":
    main()
