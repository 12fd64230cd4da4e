"""Chat templates: equal to what transformers renders, and bounded."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pageferry.gateway import template_limits
from pageferry.gateway.chat import ChatTemplate, find_template
from pageferry.gateway.errors import ApiError
from pageferry.kvtransfer.model_files import ModelNotFound

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = """{{ bos_token }}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<turn>' + role + '\n' + message['content'] | trim }}
    {% generation %}{{ eos_token }}{% endgeneration %}
{%- endfor %}
"""
ALTERNATING = """{% set ns = namespace(found=false) %}{{ bos_token }}
{% for message in messages %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Conversation roles must alternate user/assistant/...') }}
  {% endif %}
  {% if '<x>' in message.content %}{% set ns.found = true %}{% continue %}{% endif %}
  [{{ message | tojson }}|{{ message.content.split('.')[-1] }}]
{% endfor %}
{{ ns.found }}{% for i in range(3) %}{{ i * 2 }}{% if i == 1 %}{% break %}{% endif %}{% endfor %}
{% if tools is none and not documents %}no tools{% endif %}{{ strftime_now('%Y') }}
"""
REASONING = """{% for m in messages %}{{ m.role }}:
{%- if m.reasoning_content is defined %}{{ m.reasoning_content }}/{{ m.thinking }}{% endif %}
{{ m.content }}{{ '-' * 3 }}{{ 2 ** 3 }}
{% endfor %}{{ enable_thinking is defined and not enable_thinking }}"""


def turns(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant" if index % 2 else "user", "content": content}
        for index, content in enumerate(contents)
    ]


CONVERSATIONS = [
    turns("Say hi."),
    turns(" a \n", "b<x>", "é\"'<&>日本"),
    [{"role": "assistant", "content": "x", "reasoning": "why"}],
]


@pytest.mark.parametrize("source", [CHATML, TRIMMING, ALTERNATING, REASONING])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add", [True, False])
def test_renders_as_transformers_does(source, messages, add):
    extra = {"enable_thinking": False}
    try:
        [expected], _ = render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=add, **TOKENS, **extra
        )
    except Exception as error:
        expected = str(error)
    template = ChatTemplate(source, TOKENS)
    try:
        text = template.render(messages, add_generation_prompt=add, template_kwargs=extra)
    except ApiError as error:
        text = error.message.removeprefix("the model's chat template refuses these messages: ")
    assert text == expected


def refusal(source: str, messages=None) -> str:
    with pytest.raises(ApiError) as caught:
        ChatTemplate(source, TOKENS).render(messages or turns("secret"))
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert "secret" not in caught.value.message
    assert "{{" not in caught.value.message
    return caught.value.message


def test_the_templates_own_message_reaches_the_client():
    assert "must alternate" in refusal(ALTERNATING, [turns("a")[0]] * 2)


GROW = (
    "{%% set n = namespace(x='aaaaaaaaaa') %%}{%% for i in range(60) %%}{%% set x = n.x %%}"
    "{%% set n.x = %s %%}{%% endfor %%}"
)
"""Each turn makes a text out of the one before."""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.__class__.__mro__ }}{{ ''.__class__.x }}", "must not do"),
        ("{{ messages.append(1) }}", "must not do"),
    ],
)
def test_failures_inside_a_template(source, reason):
    assert reason in refusal(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "loop"),
        ("{{ 'x' * 1000000000 }}", "repetition"),
        ("{{ 1000000000 * [1] }}", "repetition"),
        ("{{ 9 ** 1000000000 }}", "power"),
        ("{% set x = 'x' * 9999 %}{% for i in range(9999) %}{{ x }}{% endfor %}", "output"),
        (
            "{% set m = 'x' * 50 %}{% for a in m %}{% for b in m %}{% for c in m %}{% for d in m %}"
            + "{% endfor %}" * 4,
            "loop",
        ),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", ""),
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
            "loop",
        ),
        ("{% for x in [[1]] recursive %}{{ loop([[1], [1]]) }}{% endfor %}", ""),
        (GROW % "x ~ x", "text"),
        (GROW % "x + x", "text"),
        (GROW % "x.replace('a', x)", "replacing"),
        (GROW % "x | replace('a', x)", "replacing"),
        (GROW % "x.join(x)", "joining"),
        (GROW % "x | join(x)", "joining"),
        (GROW % "[x, x, x] | join(x)", "joining"),
        ("{{ 'a'.center(1000000000) }}", "number"),
        ("{{ 'a' | center(1000000000) }}", "number"),
        ("{{ 'a' | indent(width=1000000000) }}", "number"),
        ("{{ 'a\tb'.expandtabs(1000000000) }}", "number"),
        ("{{ '%1000000000d' % 1 }}", "width"),
        ("{{ '%*d' % (1000000000, 1) }}", "width"),
        ("{{ '%1000000000d' | format(1) }}", "width"),
        ("{{ '{:1000000000}'.format(1) }}", "width"),
        ("{{ '{:>{}}'.format(1, 1000000000) }}", "number"),
    ],
)
def test_bounds(source, reason):
    assert (f"too much ({reason})" if reason else "it fails with RecursionError") in refusal(source)


def test_ordinary_arithmetic_is_not_bounded():
    source = "{{ 90000 * 0.5 }} {{ 0.5 * 90000 }} {{ 90000 * 90000 }} {{ 'ab' * 2 }} {{ 2 ** 8 }}"
    assert ChatTemplate(source, {}).render(turns("")) == "45000.0 45000.0 8100000000 abab 256"


def test_time_is_bounded(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_RENDER_S", -1.0)
    assert "too much" in refusal("{{ messages[0].role }}")


def test_long_messages_are_not_too_much_output():
    text = "x" * 3_000_000
    assert len(ChatTemplate(CHATML, {}).render(turns(text))) > len(text)


def test_developer_is_system_unless_the_template_knows_it():
    messages = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}", {}).render(messages) == "system"
    knowing = "{{ messages[0].role }}{# developer #}"
    assert ChatTemplate(knowing, {}).render(messages) == "developer"
    assert messages[0]["role"] == "developer"


def test_variables_of_the_server_win():
    template = ChatTemplate("{{ messages[0].content }}{{ flag }}", {})
    assert template.render(turns("a"), template_kwargs={"messages": 1, "flag": 2}) == "a2"


def test_broken_template_is_an_error_at_the_start():
    with pytest.raises(ModelNotFound, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_where_templates_are_found(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert find_template(tmp_path, {}) is None
    assert find_template(tmp_path, {"chat_template": "S"}) == "S"
    assert find_template(tmp_path, {"chat_template": named}) == "D"
    assert find_template(tmp_path, {"chat_template": named[:1]}) is None
    (tmp_path / "chat_template.jinja").write_text("F", encoding="utf-8")
    assert find_template(tmp_path, json.loads('{"chat_template": "S"}')) == "F"
