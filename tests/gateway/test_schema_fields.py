"""What calls may ask for, what prompts and messages may look like."""

import json

import pytest

from pageferry.gateway.errors import ApiError
from pageferry.gateway.schema import parse_chat, parse_completion
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


# --- what is not implemented ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", "text"),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 0),
        ("guided_json", {}),
        ("guided_regex", "a*"),
        ("structured_outputs", {"regex": "a"}),
        ("modalities", ["text", "audio"]),
        ("use_beam_search", True),
        ("use_beam_search", 1),
        ("chat_template", "{{ 1 }}"),
        ("add_generation_prompt", False),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("remote_host", "10.0.0.1"),
        ("bootstrap_host", "10.0.0.1"),
        ("cache_salt", "s"),
        ("priority", 5),
        ("priority", False),
    ],
)
@pytest.mark.parametrize("parse", [completion, chat])
def test_unsupported_fields_are_named(parse, name, value):
    error = refused(parse, **{name: value})
    assert error.param == name
    assert name in error.message


@pytest.mark.parametrize("parse", [completion, chat])
def test_neutral_values_of_unsupported_fields(parse):
    for name, values in UNSUPPORTED.items():
        for value in values:
            assert parse(**{name: value}) == parse()


def test_best_of():
    assert completion(n=2, best_of=2).n == 2
    assert refused(completion, n=2, best_of=1).param == "best_of"
    assert refused(completion, n=2, best_of=3).param == "best_of"


def test_echo():
    assert completion(echo=True).echo
    assert refused(completion, echo=True, logprobs=0).param == "logprobs"
    assert refused(chat, echo=True).param == "echo"
    assert not chat(echo=False).echo


def test_stream_options():
    assert not completion(stream=True).include_usage
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    assert not completion(stream=True, stream_options={"include_usage": None}).include_usage
    assert refused(completion, stream_options={"include_usage": True}).param == "stream_options"
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert completion(stream=True, stream_options=both).continuous_usage
    for off in ({"include_usage": False}, {"continuous_usage_stats": None}):
        assert not completion(stream=True, stream_options={**both, **off}).continuous_usage
    for value in ([], "x", {"include_usage": 1}, {"continuous_usage_stats": "true"}):
        assert refused(completion, stream=True, stream_options=value).param == "stream_options"


def test_service_tier_chooses_the_queue_class():
    assert completion().priority_class == "interactive"
    assert completion(service_tier="flex").priority_class == "batch"
    assert refused(completion, service_tier=5).param == "service_tier"


# --- prompts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompt_forms(prompt, expected):
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [""],
        [],
        [[]],
        ["a", ""],
        [[1], []],
        None,
        5,
        {},
        True,
        [True],
        [1.0],
        [None],
        [-1],
        [2**31],
        [1, "a"],
        [[1, "a"]],
        [[True]],
        [[[1]]],
        ["a"] * 1025,
        [[1]] * 1025,
    ],
)
def test_bad_prompts(prompt):
    assert refused(completion, prompt=prompt).param == "prompt"


# --- messages ---------------------------------------------------------------------------------


def test_content_parts_are_joined_with_nothing():
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi."}]
    call = chat(messages=[{"role": "system", "content": parts}, {"role": "user", "content": ""}])
    assert call.messages == [
        {"role": "system", "content": "Say hi."},
        {"role": "user", "content": ""},
    ]


def test_nulls_and_history_of_an_assistant_turn():
    message = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": [],
        "function_call": None,
        "name": "n",
        "reasoning_content": "because",
    }
    assert chat(messages=[message]).messages == [
        {"role": "assistant", "content": "x", "name": "n", "reasoning_content": "because"}
    ]


def part(**fields):
    return [{"role": "user", "content": [fields]}]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        {},
        "x",
        ["x"],
        [{"role": "user"}],
        [{"role": "assistant", "content": None}],
        [{"content": "x"}],
        [{"role": "alien", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "tool", "content": "x", "tool_call_id": "1"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": "x", "name": 5}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        part(type="text"),
        part(type="text", text=5),
        part(type="image_url", image_url={"url": "data:"}),
        USER * 4097,
    ],
)
def test_bad_messages(messages):
    assert refused(chat, messages=messages).param == "messages"


def test_other_part_types_are_named():
    assert "image_url" in refused(chat, messages=part(type="image_url")).message


def test_template_kwargs():
    call = chat(chat_template_kwargs={"enable_thinking": False})
    assert call.template_kwargs == {"enable_thinking": False}
    for bad in ([], {"messages": 1}, {"a": [1]}, {"a b": 1}, {"tools": 1}):
        assert refused(chat, chat_template_kwargs=bad).param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["MARKER" * 100]},
        {"temperature": "MARKER"},
        {"logit_bias": {"MARKER": 1}},
        {"messages": [{"role": "MARKER " * 9, "content": "MARKER"}]},
        {"messages": [{"role": "user", "content": {"text": "MARKER"}}]},
        {"response_format": {"type": "MARKER"}},
    ],
)
def test_errors_do_not_repeat_what_the_client_wrote(fields):
    assert "MARKER" not in refused(chat, **fields).message
