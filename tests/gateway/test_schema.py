"""What the front door accepts and refuses, field by field."""

import json

import pytest

from pageferry.gateway.errors import ApiError
from pageferry.gateway.schema import Call, parse_chat, parse_completion
from pageferry.gateway.schema_fields import UNSUPPORTED

USER = [{"role": "user", "content": "hello"}]


def completion(**fields):
    return parse_completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def chat(**fields):
    return parse_chat(json.dumps({"model": "m", "messages": USER, **fields}).encode())


def refused(parse, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert caught.value.message
    return caught.value


def refused_body(parse, body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert caught.value.status == 400
    return caught.value


GOOD = b'"model":"m","prompt":"p","messages":[{"role":"user","content":"u"}]'


@pytest.mark.parametrize("parse", [parse_completion, parse_chat])
@pytest.mark.parametrize(
    "body",
    [
        b"{" + GOOD,
        b"[]",
        b'"x"',
        b"",
        b"null",
        b"{" + GOOD + b',"zzz":"\xe9"}',
        b"[" * 10_000,
        b'{"a":' * 100_000,
        b"{" + GOOD + b',"zzz":"\\ud83d"}',
        b"{" + GOOD + b',"\\uDC00":1}',
        b"{" + GOOD + b',"zzz":' + b"9" * 5000 + b"}",
        b"{" + GOOD + b',"zzz":NaN}',
        b"{" + GOOD + b',"temperature":-Infinity}',
    ],
)
def test_bodies_that_are_no_json_object(parse, body):
    assert refused_body(parse, body).param is None


def test_byte_order_mark_is_tolerated():
    assert parse_completion(b"\xef\xbb\xbf{" + GOOD + b"}").prompts == ["p"]


def test_surrogate_pairs_are_fine():
    body = b'{"model":"m","prompt":"\\ud83d\\ude00"}'
    assert parse_completion(body).prompts == ["\U0001f600"]


def optional_fields(cls: type[Call]) -> list[str]:
    names = [f.alias or name for name, f in cls.model_fields.items() if not f.is_required()]
    assert len(names) > 20
    return names


@pytest.mark.parametrize("parse", [completion, chat])
def test_null_is_absent(parse):
    plain = parse()
    nulls = dict.fromkeys([*optional_fields(type(plain)), *UNSUPPORTED])
    assert parse(**nulls) == plain


def test_defaults():
    call = completion()
    assert (call.n, call.stream, call.stop, call.logprobs, call.max_tokens) == (
        1,
        False,
        (),
        -1,
        None,
    )
    sampling = call.sampling((2,), 16, 7, 100)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert (sampling.stop_token_ids, sampling.max_tokens, sampling.seed) == ((2,), 16, 7)


@pytest.mark.parametrize("parse", [completion, chat])
def test_unknown_and_bookkeeping_fields_are_tolerated(parse):
    call = parse(
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        zzz={"q": [1]},
        request_id="r",
        parallel_tool_calls=True,
        model_extra=1,
        logits=[1],
    )
    assert call == parse()


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize("model", [5, None, ["m"], True])
def test_model_must_be_a_string(parse, model):
    assert refused(parse, model=model).param == "model"


# --- numbers ----------------------------------------------------------------------------------

WHOLE = ["max_tokens", "max_completion_tokens", "min_tokens", "n", "top_k", "seed"]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [10.5, "10", True, [10], {}, 1e30, 2**70])
def test_whole_numbers_are_strict(name, value):
    assert refused(completion, **{name: value}).param == name
    assert refused(chat, **{name: value}).param == name


@pytest.mark.parametrize("name", WHOLE)
def test_ten_point_zero_is_ten(name):
    fields = {name: 10.0} if name != "min_tokens" else {"min_tokens": 10.0, "max_tokens": 10}
    value = getattr(completion(**fields), name)
    assert value == 10
    assert type(value) is int


REALS = {
    "temperature": ([0, 0.0, 1, 2], [-0.1, 2.1]),
    "top_p": ([1e-9, 0.0001, 1], [0, 1.5, -1]),
    "min_p": ([0, 0.5], [1, -0.1]),
    "presence_penalty": ([-2, 2], [-2.1, 10]),
    "frequency_penalty": ([-2, 2], [2.1, -10]),
    "repetition_penalty": ([0.1, 1, 2], [0, -1, 2.1]),
}


@pytest.mark.parametrize("name", REALS)
def test_ranges_of_real_numbers(name):
    good, bad = REALS[name]
    for value in good:
        call = completion(**{name: value})
        assert getattr(call.sampling((), 1, 0, 10), name) == value
    for value in [*bad, "0.5", True, [1], 10**400]:
        assert refused(completion, **{name: value}).param == name
    error = refused_body(parse_completion, b'{"model":"m","prompt":"p","%b":1e400}' % name.encode())
    assert error.param == name


@pytest.mark.parametrize(
    ("value", "expected"), [(-1, 0), (0, 0), (1, 1), (99, 99), (100, 0), (10**9, 0)]
)
def test_top_k_off_and_beyond_the_vocabulary(value, expected):
    assert completion(top_k=value).sampling((), 1, 0, 100).top_k == expected


def test_top_k_below_minus_one():
    assert refused(completion, top_k=-2).param == "top_k"


@pytest.mark.parametrize("value", [0, 129, 10**6, -1])
def test_n_out_of_range(value):
    assert refused(completion, n=value).param == "n"


def test_max_tokens():
    assert completion(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(max_tokens=5).max_tokens == 5
    assert completion(max_tokens=2**63).max_tokens == 2**63
    assert refused(completion, max_tokens=-1).param == "max_tokens"
    assert refused(completion, max_tokens=0).param == "max_tokens"
    assert refused(chat, max_completion_tokens=0).param == "max_completion_tokens"
    assert completion(max_tokens=0, echo=True).max_tokens == 0


def test_min_tokens_must_fit_into_max_tokens():
    assert refused(completion, min_tokens=6, max_tokens=5).param == "min_tokens"
    call = completion(min_tokens=6)
    with pytest.raises(ApiError) as caught:
        call.sampling((), 5, 0, 10)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(("seed", "expected"), [(5, 5), (-1, 2**63 - 1), (2**63 - 1, 2**63 - 1)])
def test_seed_becomes_unsigned(seed, expected):
    assert completion(seed=seed).seed == seed
    assert completion().sampling((), 1, seed, 10).seed == expected


FLAGS = ["stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo"]


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [1, 0, "true", []])
def test_flags_are_strict(name, value):
    assert refused(completion, **{name: value}).param == name


# --- stop, bias, logprobs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [([], ()), ("a", ("a",)), (["a", "b", "a"], ("a", "b")), (["x" * 256] * 16, ("x" * 256,))],
)
def test_stop(value, expected):
    assert completion(stop=value).stop == expected


@pytest.mark.parametrize(
    "value", ["", [""], ["a", ""], [1], 5, {}, [None], "x" * 257, ["x"] * 17, ["x"] * 10_000]
)
def test_bad_stop(value):
    assert refused(completion, stop=value).param == "stop"


def test_stop_token_ids_and_ignore_eos():
    call = completion(stop_token_ids=[28, 2])
    assert call.sampling((2, 0), 1, 0, 100).stop_token_ids == (2, 0, 28)
    call = completion(stop_token_ids=[28], ignore_eos=True)
    assert call.sampling((2,), 1, 0, 100).stop_token_ids == (28,)


@pytest.mark.parametrize("ids", [["28"], [True], 28, [1.5], [2**64], [1] * 129])
def test_bad_stop_token_ids(ids):
    assert refused(completion, stop_token_ids=ids).param == "stop_token_ids"


@pytest.mark.parametrize(
    "fields",
    [{"stop_token_ids": [100]}, {"stop_token_ids": [-1]}, {"logit_bias": {"100": 1}}],
)
def test_ids_outside_the_vocabulary(fields):
    call = completion(**fields)
    with pytest.raises(ApiError) as caught:
        call.sampling((), 1, 0, 100)
    assert (caught.value.status, caught.value.param) == (400, next(iter(fields)))


def test_logit_bias():
    call = completion(logit_bias={"0": -100, "99": 100, "7": 1.5})
    assert call.sampling((), 1, 0, 100).logit_bias == {0: -100.0, 99: 100.0, 7: 1.5}


@pytest.mark.parametrize("key", ["-1", "AI", "1.5", "99999999999999999999", "", " 1", "١"])
def test_bad_logit_bias_keys(key):
    assert refused(completion, logit_bias={key: 1}).param == "logit_bias"


@pytest.mark.parametrize("bias", [{"1": 101}, {"1": "1"}, {"1": True}, {"1": None}, [1], "x"])
def test_bad_logit_bias_values(bias):
    assert refused(completion, logit_bias=bias).param == "logit_bias"


def test_logit_bias_limits():
    assert len(completion(logit_bias={str(i): 1 for i in range(300)}).logit_bias) == 300
    assert refused(completion, logit_bias={str(i): 1 for i in range(301)}).param == "logit_bias"
    body = b'{"model":"m","prompt":"p","logit_bias":{"1":1e400}}'
    assert refused_body(parse_completion, body).param == "logit_bias"


def test_completion_logprobs():
    assert [completion(logprobs=k).logprobs for k in (0, 5, 20)] == [0, 5, 20]
    assert completion(logprobs=3).sampling((), 1, 0, 10).logprobs == 3
    for value in (True, False, -1, 21, "5"):
        assert refused(completion, logprobs=value).param == "logprobs"


def test_chat_logprobs():
    assert chat().logprobs == -1
    assert chat(logprobs=False, top_logprobs=0).logprobs == -1
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20
    assert refused(chat, logprobs=5).param == "logprobs"
    assert refused(chat, top_logprobs=2).param == "top_logprobs"
    assert refused(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refused(chat, logprobs=True, top_logprobs=True).param == "top_logprobs"
