"""What every generation engine keeps, whatever is inside: a new engine adds one entry to BACKENDS.

The witness is the plain Hugging Face model: one forward pass of one sequence, and a loop over its own cache.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines import (
    BACKENDS,
    MAX_PROMPT_TOKENS,
    STEPPING,
    Endless,
    Setup,
    assert_logprobs,
    by_hand,
    drain,
    drawn,
    expected_stop,
    load,
    no_end,
    prompts_of,
    request_of,
    run,
    take,
    with_ends,
)
from tests.support.models import EOS, EOT, PAD, log_softmax_of, perturbed, tiny_tokenizer
from tests.support.models import tiny_model as tiny_model_of
from zbgrpo.config.schema import InferenceConfig
from zbgrpo.inference.base import InferenceBackend, Response
from zbgrpo.inference.sampling import uniforms
from zbgrpo.inference.transformers_backend import TransformersBackend
from zbgrpo.types import FinishReason

Make = Callable[[Setup], InferenceBackend]


# Heads of 32, the smallest that every engine takes.
tiny_model = partial(tiny_model_of, hidden_size=128)


def maker(name: str) -> Make:
    """Factory of an engine at version 0."""

    def build(setup: Setup) -> InferenceBackend:
        backend = BACKENDS[name](setup)
        backend.weights_changed(0)
        return backend

    return build


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def make(engine: str) -> Make:
    """Factory of the engine under test."""
    return maker(engine)


@pytest.fixture(params=STEPPING)
def make_stepping(request: pytest.FixtureRequest) -> Make:
    """Factory of the engine under test, for what is promised only of engines that step; see `STEPPING`."""
    return maker(request.param)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen2", tied=True)


@pytest.fixture(scope="module")
def free(make: Make, model: Any) -> tuple[list[int], dict[Any, Response]]:
    """A prompt and what its responses are when nothing ends them, made by the engine under test."""
    prompt = prompts_of([7])[0]
    backend = make(Setup(no_end(model), Endless(tiny_tokenizer()), slots=8))
    return prompt, run(backend, [request_of(0, prompt, 8)])


# ------------------------------------------------------------------------------------------------ log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_logprobs_are_those_of_the_plain_model(make: Make, family: str, tied: bool, temperature: float) -> None:
    plain = tiny_model(family, tied, seed=4, num_layers=3)
    prompts = prompts_of([1, 3, 17, 2, 40, 9])
    backend = make(Setup(plain, slots=5, max_new_tokens=30))
    done = run(backend, [request_of(k, p, 3, temperature) for k, p in enumerate(prompts)])
    assert len(done) == 18
    assert {r.finish for r in done.values()} == {FinishReason.END_TOKEN, FinishReason.LENGTH}
    for (key, _), response in done.items():
        assert_logprobs(plain, prompts[key], response, temperature)
        assert response.spans == [(0, 0)]


def test_tokens_are_drawn_by_the_stream_of_the_response(make_stepping: Make, model: Any) -> None:
    """Token i is the first whose cumulative probability exceeds draw i: by a plain float64 sum here."""
    prompt = prompts_of([6])[0]
    backend = make_stepping(Setup(model))
    request = request_of(5, prompt, 4, 0.7)
    for response in run(backend, [request]).values():
        with torch.no_grad():
            full = log_softmax_of(model, prompt, response.token_ids, 0.7)
        draws = uniforms(np.full(len(full), request.streams[response.response_index], np.uint64), np.arange(len(full)))
        assert drawn(full, draws) == response.token_ids.tolist()


def test_pad_equal_to_end_and_such_ids_inside_the_prompt(make: Make, model: Any) -> None:
    prompts = [[EOS, PAD, 9, EOS], [20, 21], [EOT, EOS, PAD, PAD, 30, 31, EOS, PAD]]
    backend = make(Setup(model, tiny_tokenizer(pad_is_eos=True), max_new_tokens=60))
    done = run(backend, [request_of(k, p, 4) for k, p in enumerate(prompts)])
    ended = [r for r in done.values() if r.finish is FinishReason.END_TOKEN]
    assert ended, "no response ended by itself: the test needs other seeds"
    for (key, _), response in done.items():
        assert_logprobs(model, prompts[key], response, 1.0)  # that of the end token too
    assert all(r.token_ids[-1] == EOS and EOS not in r.token_ids[:-1] for r in ended)


def test_a_response_keeps_to_its_own_limit(make: Make, free: tuple[list[int], dict[Any, Response]]) -> None:
    """Where it is the lesser one, whatever its neighbours do; it is the beginning of what it would be without."""
    prompt, whole = free
    longest = len(whole[0, 0].token_ids)
    limits = [3, longest, 1, longest + 5, 7, 2, longest - 1, 4]
    backend = make(Setup(no_end(tiny_model("qwen2", tied=True)), Endless(tiny_tokenizer()), slots=3))
    for (_, n), response in run(backend, [request_of(0, prompt, 8)._replace(max_new_tokens=limits)]).items():
        assert response.finish is FinishReason.LENGTH
        assert response.token_ids.tolist() == whole[0, n].token_ids[: limits[n]].tolist()


def test_top_k_and_top_p_restrict_the_choice_and_not_the_logprob(make: Make, engine: str, model: Any) -> None:
    prompt = prompts_of([5])[0]
    temperature = 1.3 if engine in STEPPING else 1.0  # vLLM has no such log-probs at another, see `vllm_settings`
    for top_k, top_p in [(3, 1.0), (None, 0.5), (4, 0.6)]:
        backend = make(Setup(model, top_k=top_k, top_p=top_p, max_new_tokens=16))
        ranks = []
        for response in run(backend, [request_of(1, prompt, 8, temperature)]).values():
            assert_logprobs(model, prompt, response, temperature)
            with torch.no_grad():
                full = log_softmax_of(model, prompt, response.token_ids, temperature)
            for row, token in zip(full.double().exp(), response.token_ids.tolist(), strict=True):
                ordered = row.sort(descending=True)
                rank = int((ordered.indices == token).nonzero())
                kept = ordered.values[: top_k or len(row)]
                ranks.append(rank)
                assert rank < len(kept)
                assert float(kept[:rank].sum() / kept.sum()) < top_p + 1e-6
        assert max(ranks) >= 1, "always the most likely token: nothing was sampled"


def test_greedy_is_what_generate_says(make: Make) -> None:
    plain = with_ends(tiny_model("llama", tied=False, seed=9), [EOS, EOT])
    prompts = prompts_of([4, 12, 7], seed=2)
    backend = make(Setup(plain, max_new_tokens=20))
    done = run(backend, [request_of(k, p, 2, temperature=0.0) for k, p in enumerate(prompts)])
    for (key, _), response in done.items():
        ids = torch.tensor([prompts[key]])
        expected = plain.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=PAD
        )
        assert response.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()
        assert_logprobs(plain, prompts[key], response, 1.0)


# ------------------------------------------------------------------------------------------------ independence


def test_what_a_response_samples_does_not_depend_on_company_slots_or_order(make: Make, model: Any) -> None:
    prompts = prompts_of([5, 31, 2, 11, 8])
    requests = [request_of(k, p, 3, [1.0, 0.7, 1.2, 1.0, 0.9][k]) for k, p in enumerate(prompts)]
    alone: dict[Any, list[int]] = {}
    for request in requests:
        for index, name in enumerate(request.streams):
            backend = make(Setup(model, slots=1, max_new_tokens=30))
            single = run(backend, [request._replace(streams=[name])])
            alone[request.key, index] = single[request.key, 0].token_ids.tolist()
    assert len({tuple(tokens) for tokens in alone.values()}) == 15
    for slots, order in [(15, requests), (4, requests[::-1]), (7, [requests[i] for i in (3, 0, 4, 2, 1)])]:
        together = run(make(Setup(model, slots=slots, max_new_tokens=30)), order)
        assert {name: r.token_ids.tolist() for name, r in together.items()} == alone


def test_prompts_of_different_lengths_prefilled_together(make: Make, model: Any) -> None:
    lengths = [1, 190, 2, 60, 1, 128]
    prompts = prompts_of(lengths, seed=5)
    done = run(make(Setup(model, slots=6, max_new_tokens=8)), [request_of(k, p) for k, p in enumerate(prompts)])
    assert len(done) == 6
    for (key, _), response in done.items():
        assert_logprobs(model, prompts[key], response, 1.0)


def test_a_response_much_longer_than_its_prompt(make: Make, model: Any) -> None:
    """What holds keys and values has to grow on the way, more than once."""
    prompts = prompts_of([2, 3], seed=6)
    backend = make(Setup(no_end(model), Endless(tiny_tokenizer()), slots=2, max_new_tokens=300))
    for (key, _), response in run(backend, [request_of(k, p) for k, p in enumerate(prompts)]).items():
        assert len(response.token_ids) == 300
        assert_logprobs(model, prompts[key], response, 1.0)


# ------------------------------------------------------------------------------------------------ slots


def test_more_requests_than_slots_and_slots_are_refilled_at_once(make: Make, model: Any) -> None:
    prompts = prompts_of([3, 9, 4, 15, 6, 5, 8])
    backend = make(Setup(model, slots=4, max_new_tokens=30))
    for key, prompt in enumerate(prompts):
        backend.submit(request_of(key, prompt, 3))
    assert (backend.num_slots, backend.num_active, backend.num_unstarted) == (4, 0, 21)
    done: dict[Any, Response] = {}
    while backend.num_active or backend.num_unstarted:
        active, unstarted = backend.num_active, backend.num_unstarted
        finished = take(backend, done)
        # Whoever started in this step is active after it, or finished in it.
        started = unstarted - backend.num_unstarted
        assert active + started == backend.num_active + len(finished)
        assert active + started >= min(backend.num_slots, active + unstarted), "a slot stayed empty for a step"
        assert backend.num_active <= backend.num_slots
    assert sorted(done) == [(key, index) for key in range(7) for index in range(3)]
    lengths = {len(r.token_ids) for r in done.values()}
    assert len(lengths) > 3, "all alike: nothing was refilled in between"
    for (key, _), response in done.items():
        assert_logprobs(model, prompts[key], response, 1.0)


def test_requests_may_come_at_any_time(make: Make, model: Any) -> None:
    prompts = prompts_of([4, 20, 6, 3])
    requests = [request_of(k, p, 2) for k, p in enumerate(prompts)]
    at_once = run(make(Setup(model, slots=3)), requests)
    backend, done = make(Setup(model, slots=3)), {}
    for request in requests:
        backend.submit(request)
        for _ in range(5):
            take(backend, done)
    drain(backend, done)
    assert backend.step() == []
    assert {n: r.token_ids.tolist() for n, r in done.items()} == {n: r.token_ids.tolist() for n, r in at_once.items()}


def test_a_request_for_no_response_is_an_error(make: Make, model: Any) -> None:
    backend = make(Setup(model))
    with pytest.raises(ValueError, match=r"request 7.*streams are empty"):
        backend.submit(request_of(7, [1, 2], 0))
    assert backend.num_unstarted == 0 and backend.step() == []


def test_a_prompt_is_dropped_when_its_last_response_has_started(model: Any) -> None:
    backend = TransformersBackend(
        no_end(model),
        Endless(tiny_tokenizer()),
        InferenceConfig(num_generations=1, inference_microbatch_size=2, max_new_tokens=6),
        (),
        MAX_PROMPT_TOKENS,
    )
    backend.submit(request_of(0, [5, 6, 7], 3))
    backend.step()
    prefix = weakref.ref(backend._waiting[0].prefix)
    while backend.num_unstarted:
        assert prefix() is not None
        backend.step()
    assert backend.num_active == 1 and prefix() is None


# ------------------------------------------------------------------------------------------------ ends


def test_a_second_end_id_ends_a_response(make: Make, model: Any, free: Any) -> None:
    prompt, responses = free
    second = int(responses[0, 0].token_ids[4])
    ended = run(make(Setup(with_ends(no_end(model), [EOS, second]), slots=8)), [request_of(0, prompt, 8)])
    reasons = set()
    for name, response in ended.items():
        tokens = responses[name].token_ids.tolist()
        end = next((i for i, t in enumerate(tokens) if t in (EOS, second)), None)
        assert response.token_ids.tolist() == (tokens if end is None else tokens[: end + 1])
        assert response.finish is (FinishReason.LENGTH if end is None else FinishReason.END_TOKEN)
        np.testing.assert_allclose(response.logprobs, responses[name].logprobs[: len(response.token_ids)], atol=1e-5)
        reasons.add((response.finish, int(response.token_ids[-1])))
    assert (FinishReason.END_TOKEN, second) in reasons


@pytest.mark.parametrize("limit", [1, 2, 9])
def test_an_end_token_at_the_limit_is_no_truncation(make: Make, model: Any, free: Any, limit: int) -> None:
    prompt, responses = free
    (_, index), tokens = next(
        (name, tokens)
        for name, response in sorted(responses.items())
        if (tokens := response.token_ids.tolist())[limit - 1] not in tokens[: limit - 1]
    )
    end, request = tokens[limit - 1], request_of(0, prompt, 8)
    request = request._replace(streams=request.streams[index : index + 1])
    plain = with_ends(no_end(model), [end])
    for max_new, finish in [(limit, FinishReason.END_TOKEN), (limit - 1, FinishReason.LENGTH)]:
        if max_new == 0:
            continue
        backend = make(Setup(plain, Endless(tiny_tokenizer()), max_new_tokens=max_new))
        response = run(backend, [request])[0, 0]
        assert response.token_ids.tolist() == tokens[:max_new]
        assert response.finish is finish


@pytest.mark.parametrize("kind", ["inside a token", "across tokens", "a whole token", "two of them", "none of them"])
def test_a_stop_string_stays_in_the_text_and_ends_it(make: Make, model: Any, free: Any, kind: str) -> None:
    prompt, responses = free
    tokenizer = tiny_tokenizer()
    texts = {name: [tokenizer.decode([t]) for t in r.token_ids.tolist()] for name, r in responses.items()}
    pieces = [piece for text in texts.values() for piece in text]
    long = next(p for p in pieces if len(p) == 3 and p.isascii())
    first = next(text for text in texts.values())
    stops = {
        "inside a token": [long[1]],
        "across tokens": ["".join(first[8:12])[1:] if len(first[8]) > 1 else "".join(first[8:12])],
        "a whole token": [long],
        "two of them": ["", first[-1], long[:2]],
        "none of them": ["never in it"],
    }[kind]
    backend = make(Setup(no_end(model), Endless(tokenizer), slots=8, stop=stops))
    stopped = run(backend, [request_of(0, prompt, 8)])
    num_stopped = 0
    for name, response in stopped.items():
        tokens = responses[name].token_ids.tolist()
        end = expected_stop(tokenizer, tokens, [s for s in stops if s])
        assert response.token_ids.tolist() == tokens[:end]
        assert response.finish is (FinishReason.LENGTH if end is None else FinishReason.STOP_STRING)
        assert len(response.logprobs) == len(response.token_ids)
        num_stopped += end is not None
    assert (num_stopped > 0) == (kind != "none of them")


def test_a_stop_string_of_a_character_in_two_byte_tokens(make: Make, model: Any) -> None:
    """The text is looked at when the last byte has come: the first byte alone is no character."""
    biased = copy.deepcopy(model)
    tokenizer = tiny_tokenizer()
    first, second = tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>"])
    with torch.no_grad():  # both bytes become likely everywhere
        biased.get_input_embeddings().weight[[first, second]] *= 2
    backend = make(Setup(no_end(biased), Endless(tokenizer), slots=8, stop=["é"]))
    done: dict[Any, Response] = {}
    stopped: list[list[int]] = []
    for key, prompt in enumerate(prompts_of([5] * 40)):
        done |= run(backend, [request_of(key, prompt, 8)])
        stopped = [r.token_ids.tolist() for r in done.values() if r.finish is FinishReason.STOP_STRING]
        if len(stopped) >= 2:
            break
    assert stopped, "the test needs other seeds"
    for tokens in stopped:
        assert tokens[-2:] == [first, second]
    for response in done.values():
        text = tokenizer.decode(response.token_ids.tolist())
        assert text.count("é") == (response.finish is FinishReason.STOP_STRING)


def test_an_end_token_wins_over_a_stop_string_and_that_over_the_limit(make: Make, model: Any, free: Any) -> None:
    prompt, responses = free
    tokenizer = tiny_tokenizer()
    tokens = responses[0, 0].token_ids.tolist()
    place = next(i for i, t in enumerate(tokens) if i > 2 and t not in tokens[:i] and tokenizer.decode([t]).isalnum())
    stop = tokenizer.decode([tokens[place]])
    limit = expected_stop(tokenizer, tokens, [stop])
    assert limit is not None
    for plain, finish in [
        (no_end(model), FinishReason.STOP_STRING),
        (with_ends(no_end(model), [tokens[limit - 1]]), FinishReason.END_TOKEN),
    ]:
        backend = make(Setup(plain, Endless(tokenizer), stop=[stop], max_new_tokens=limit))
        response = run(backend, [request_of(0, prompt)])[0, 0]
        assert response.finish is finish
        assert response.token_ids.tolist() == tokens[:limit]


# ------------------------------------------------------------------------------------------------ new weights


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_new_weights_between_two_steps(make: Make, engine: str, tied: bool) -> None:
    models = {0: no_end(tiny_model("qwen2", tied, seed=1))}
    for version in (1, 2, 5):
        models[version] = perturbed(models[0], seed=version, scale=0.1)
    prompts = prompts_of([6, 19, 3, 10])
    requests = [request_of(k, p, 3, 0.8) for k, p in enumerate(prompts)]
    max_new_tokens = 20 if engine in STEPPING else 120
    setup = Setup(models[0], Endless(tiny_tokenizer()), slots=4, max_new_tokens=max_new_tokens)
    backend, done = make(setup), {}
    for request in requests:
        backend.submit(request)
    for version, steps in [(1, 3), (2, 6), (5, 1)] if engine in STEPPING else [(1, 2), (2, 2), (5, 1)]:
        for _ in range(steps):
            take(backend, done)
        assert backend.num_active and backend.num_unstarted
        load(backend, models[version], version)
    drain(backend, done)

    assert sorted(done) == [(key, index) for key in range(4) for index in range(3)]
    num_spans = set()
    for (key, index), response in done.items():
        starts, versions = zip(*response.spans, strict=True)
        assert starts[0] == 0 and list(starts) == sorted(set(starts)) and starts[-1] < len(response.token_ids)
        assert list(versions) == sorted(set(versions)) and set(versions) <= set(models)
        full = by_hand(models, prompts[key], response, 0.8)
        tokens = torch.as_tensor(response.token_ids).long()
        expected = full[torch.arange(len(full)), tokens].numpy()
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-4, rtol=0)
        if engine in STEPPING:
            draws = uniforms(np.full(len(full), requests[key].streams[index], np.uint64), np.arange(len(full)))
            assert drawn(full, draws) == tokens.tolist()
        num_spans.add(len(response.spans))
    assert max(num_spans) >= 3, "no response lived through several versions"
    # A group that was half started goes on with the new weights from its prompt: sampled by none of the old ones.
    assert any(
        done[key, 2].spans[0][1] > done[key, 0].spans[0][1] and len(done[key, 2].spans) == 1 for key in range(4)
    ), "no group was started by two versions"


def test_every_token_has_the_version_of_its_step(make_stepping: Make, model: Any) -> None:
    """New weights after every step: with the wrong version at one token, its log-prob is off."""
    models = {0: no_end(model)} | {v: perturbed(model, seed=v, scale=0.05) for v in range(1, 7)}
    prompt = prompts_of([5])[0]
    backend, done = make_stepping(Setup(models[0], Endless(tiny_tokenizer()), slots=2, max_new_tokens=8)), {}
    backend.submit(request_of(0, prompt, 2))
    for version in range(1, 7):
        take(backend, done)
        load(backend, models[version], version)
    drain(backend, done)
    for response in done.values():
        assert response.finish is FinishReason.LENGTH and len(response.token_ids) == 8
        # An engine that steps decodes two tokens in a response's first step and one in each later one.
        assert [v for _, v in response.spans] == sorted({v for _, v in response.spans})
        assert len(response.spans) == 7
        full = by_hand(models, prompt, response, 1.0)
        expected = full[torch.arange(8), torch.as_tensor(response.token_ids).long()].numpy()
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-4, rtol=0)


def test_the_same_weights_again_change_nothing_but_the_version(make: Make, model: Any) -> None:
    prompt = prompts_of([5])[0]
    quiet = run(make(Setup(model)), [request_of(0, prompt, 5)])
    backend, done = make(Setup(model)), {}
    backend.submit(request_of(0, prompt, 5))
    version = 0
    while backend.num_active or backend.num_unstarted:
        take(backend, done)
        version += 1
        load(backend, model, version)
    assert {n: r.token_ids.tolist() for n, r in done.items()} == {n: r.token_ids.tolist() for n, r in quiet.items()}


def test_live_weights_are_the_tensors_of_the_model_tied_ones_once(make: Make) -> None:
    for tied in (True, False):
        plain = tiny_model("qwen2", tied)
        live = make(Setup(plain)).live_weights()
        weights = dict(plain.named_parameters())
        assert {n: tuple(t.shape) for n, t in live.items()} == {n: tuple(t.shape) for n, t in weights.items()}
        assert ("lm_head.weight" in live) is (not tied)
        assert all(torch.equal(live[name], weights[name]) for name in live)
