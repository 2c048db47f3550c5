"""Calls of the public client, which test_client.py runs: each one, and errors of the client's own classes."""

import math
import sys

import tinker
from tinker import types

NAME, RANK = sys.argv[1], int(sys.argv[2])  # 0: all weights
service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model=NAME, rank=RANK).result()
tokens = client.get_tokenizer().encode("seven plus one is eight")
weights = [1.0] * (len(tokens) - 1)
inputs = {"target_tokens": tokens[1:], "weights": weights}
datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
losses = []
for _ in range(6):
    passed = client.forward_backward([datum, datum], "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-2 if RANK else 1e-3))
    losses.append(passed.result().metrics["loss:sum"])
    assert stepped.result().metrics["grad_norm"] > 0
assert losses == sorted(losses, reverse=True), losses

forward = client.forward([datum], "cross_entropy").result()
custom = client.forward_backward_custom(
    [datum], lambda data, logprobs: (-sum(part.sum() for part in logprobs), {"one": 1.0})
)
assert custom.result().metrics["one"] == 1.0
assert math.isclose(custom.result().metrics["loss:sum"], forward.metrics["loss:sum"], rel_tol=1e-6)

sampler = client.save_weights_and_get_sampling_client().result()
scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
given = forward.loss_fn_outputs[0]["logprobs"].data
assert scored[0] is None and all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(scored[1:], given, strict=True)), (
    scored
)
settings = types.SamplingParams(max_tokens=5, stop=["eight"])
answer = sampler.sample(types.ModelInput.from_ints(tokens[:4]), 3, settings).result()
assert [len(one.tokens) == len(one.logprobs) <= 5 for one in answer.sequences] == [True] * 3

saved = client.save_state("a").result().path
again = service.create_training_client_from_state_with_optimizer(saved).result()
assert again.forward([datum], "cross_entropy").result().metrics == forward.metrics
named = client.save_weights_for_sampler("b").result().path
other = service.create_sampling_client(model_path=named).result()
assert other.compute_logprobs(types.ModelInput.from_ints(tokens)).result() == scored
base = service.create_sampling_client(base_model=NAME)
assert base.compute_logprobs(types.ModelInput.from_ints(tokens)).result() != scored
assert sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result() == scored
print(client.save_weights_external("c").result().path)
assert len(tinker.RestClient().list_checkpoints(client.model_id).result().checkpoints) == 4

inputs = {"target_tokens": [1, 2], "weights": [1.0, 1.0]}
vast = types.Datum(model_input=types.ModelInput.from_ints([1, 10**6]), loss_fn_inputs=inputs)
try:
    client.forward_backward([vast], "cross_entropy").result()
except tinker.RequestFailedError as error:
    assert error.category is types.RequestErrorCategory.User and "vocabulary" in str(error), error
assert client.forward([datum], "cross_entropy").result().metrics == forward.metrics
for call, error in (
    (lambda: service.create_lora_training_client(base_model="other", rank=RANK).result(), tinker.NotFoundError),
    (lambda: service.create_lora_training_client(base_model=NAME, rank=64).result(), tinker.BadRequestError),
    (lambda: tinker.ServiceClient(api_key="tml-" + "x" * 30).holder, tinker.AuthenticationError),
):
    try:
        call()
    except error:
        continue
    raise AssertionError(error)
service.close("success").result()
