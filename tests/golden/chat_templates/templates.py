# SPDX-License-Identifier: Apache-2.0
"""Templates in the style of those that models ship, and requests that exercise them."""

CHATML = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

DATED_WITH_TOOLS = """{{- bos_token }}
{%- if tools is not none and tools is defined %}{% set has_tools = true %}{% else %}{% set has_tools = false %}{% endif %}
{%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday Date: " + date_string + "\\n" }}
{%- if has_tools %}
    {{- "Functions:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start|>ipython<|end|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- elif 'tool_calls' in message and message.tool_calls %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

NAMESPACE_AND_MACRO = """{%- macro render(content) %}
{%- if content is string %}{{ content }}{%- else %}{%- for item in content %}{%- if item.type == 'text' %}{{ item.text }}{%- endif %}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- render(messages[0].content) + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n<tools>" }}
{%- for tool in tools %}
{{- "\\n" }}
{{- tool | tojson }}
{%- endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + render(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = render(message.content) %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role }}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
    {%- if reasoning_effort is defined %}{{- 'effort=' ~ reasoning_effort }}{%- endif %}
{%- endif %}"""

LOOP_CONTROLS = """{{ bos_token }}{% for message in messages %}
{% if message['role'] not in ['user', 'assistant', 'system', 'tool'] %}
    {% continue %}
{% endif %}
{% if loop.index0 > 6 %}
    {% break %}
{% endif %}
{% if message['role'] == 'system' and not loop.first %}
    {{ raise_exception('System message must come first') }}
{% endif %}
{% if message.tool_calls is defined %}
[TOOL_CALLS]{{ message.tool_calls|map(attribute='function')|list|tojson }}{{ eos_token }}
{% else %}
    [{{ message['role']|upper }}] {{ message['content'] }} [/]
{% endif %}
{% endfor %}
{% if add_generation_prompt %}[A]{% endif %}"""

PARTS = """{% for message in messages %}{{ '<' ~ message.role ~ '>' }}{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}({{ part['text'] }}{% if part.cache_control %}*{% endif %}){% endif %}{% endfor %}{% endif %}{% if message.role == 'assistant' %}{% generation %}{{ '!' }}{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""

ALIASED_PARTS = """{% set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}{% for m in loop_messages %}{% for c in m.content | list %}{{ c.text }}|{% endfor %}{{ m.role }};{% endfor %}"""

DEVELOPER = """{% for m in messages %}{% if m.role == "developer" %}<dev>{{ m.content }}{{ m.tools|tojson }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""

DUMP = """{% for m in messages %}{{ m|tojson }}
{% endfor %}
{% if tools %}{{ tools|tojson }}{% endif %}{% if documents %}{{ documents|tojson(indent=2) }}{% endif %}"""

WHITESPACE = """
  {% for m in messages %}
    {%- if m.name is defined %}{{ m.name }}: {% endif +%}
    {{ m.content|trim|replace("a", "A") }}
  {#- a comment -#}
  {% if not loop.last %}

  {% endif %}
  {% endfor %}
  {%+ if add_generation_prompt %}>{% endif %}"""

SORTED_JSON = """{{ messages|map(attribute='content')|list|tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}{{ custom|default('none') }}{{ unk_token }}{% for k, v in {'b': 1, 'a': [1, 2.5, none, true]}.items() %}{{ k }}={{ v|tojson }};{% endfor %}"""

TEMPLATES = [
    ("chatml", CHATML),
    ("dated_with_tools", DATED_WITH_TOOLS),
    ("namespace_and_macro", NAMESPACE_AND_MACRO),
    ("loop_controls", LOOP_CONTROLS),
    ("parts", PARTS),
    ("aliased_parts", ALIASED_PARTS),
    ("developer", DEVELOPER),
    ("dump", DUMP),
    ("whitespace", WHITESPACE),
    ("sorted_json", SORTED_JSON),
]

TOOLS = [
    {
        "function": {
            "parameters": {
                "type": "object",
                "properties": {"b": {"type": "string"}, "a": {"enum": ["<x>", "é"]}},
            },
            "name": "look_up",
            "x-extra": 1,
        },
        "type": "function",
        "extra": 2,
    },
    {"type": "function", "function": {"name": "f", "description": "d & d", "strict": True}},
]
CALL = {
    "index": 0,
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"b": "ü", "a": 1}', "extra": 1},
    "id": "call_1",
}


def _user(content):
    return {"role": "user", "content": content}


REQUESTS = [
    ("one turn", {"messages": [_user("Hello <b>&amp; 'quotes'</b>")]}),
    (
        "system and turns",
        {
            "messages": [
                {"role": "system", "content": " Be brief. "},
                _user("a"),
                {"role": "assistant", "content": "b"},
                _user("c"),
            ]
        },
    ),
    ("unicode", {"messages": [_user("Naïve 你好 \U0001f469\u200d\U0001f52c e\u0301\u2028end")]}),
    ("empty", {"messages": [_user("")]}),
    (
        "no generation prompt",
        {"messages": [_user("q"), {"role": "assistant", "content": "a\n"}], "add_generation_prompt": False},
    ),
    (
        "continued",
        {
            "messages": [_user("q"), {"role": "assistant", "content": "One, two "}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    (
        "continued parts",
        {
            "messages": [_user("q"), {"role": "assistant", "content": [{"type": "text", "text": "One"}]}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    ("continue and generate", {"messages": [_user("q")], "continue_final_message": True}),
    (
        "parts",
        {
            "messages": [
                {
                    "content": [
                        {"text": "one", "type": "text", "cache_control": {"type": "ephemeral"}},
                        {"type": "text", "text": "two"},
                    ],
                    "role": "user",
                }
            ]
        },
    ),
    (
        "tools",
        {
            "messages": [
                _user("q"),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {
                    "role": "tool",
                    "tool_call_id": "call_1",
                    "content": [{"type": "text", "text": "r1"}, {"type": "text", "text": "r2"}],
                },
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "not json"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c2", "name": "f", "content": "r3"},
            ],
            "tools": TOOLS,
        },
    ),
    (
        "empty tool calls",
        {"messages": [_user("q"), {"role": "assistant", "content": "x", "tool_calls": []}, _user("r")]},
    ),
    ("two calls", {"messages": [_user("q"), {"role": "assistant", "tool_calls": [CALL, CALL]}]}),
    (
        "reasoning",
        {
            "messages": [
                _user("q"),
                {"role": "assistant", "content": "<think>\nold\n</think>\n\nx", "reasoning_content": None},
                {"role": "assistant", "content": "x", "reasoning_content": "because"},
            ],
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False, "custom": "yes", "ignored": None},
        },
    ),
    (
        "effort",
        {"messages": [_user("q")], "reasoning_effort": "none", "chat_template_kwargs": {"custom": "auto"}},
    ),
    (
        "developer",
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "developer", "content": "d", "tools": None},
                _user("q"),
                {"role": "developer", "content": [{"type": "text", "text": "e"}]},
            ]
        },
    ),
    (
        "names and custom roles",
        {
            "messages": [
                {"role": "user", "name": "ann", "content": "a", "extra": 1},
                {"role": "critic", "content": "c"},
            ]
        },
    ),
    (
        "refusal part",
        {"messages": [_user("q"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
    ),
    (
        "billing header",
        {"messages": [{"role": "system", "content": "x-anthropic-billing-header: cch=1\nrest"}, _user("q")]},
    ),
    ("documents", {"messages": [_user("q")], "documents": [{"title": "t", "text": "x"}]}),
    ("special tokens", {"messages": [_user("<s>a</s><|im_end|>")], "add_special_tokens": True}),
]
