"""Chat templates with the constructs of well-known models' ones, and chats to render with them."""

from __future__ import annotations

from typing import Any

LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}
{%- set day = date_string | default("26 Jul 2024") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\nToday: " + day + "\\n" + system_message + "<|eot|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool'
        or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("One call at a time!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}" }}
        {{- "<|eot|>" }}
    {%- else %}
        {{- "<|head|>ipython<|/head|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}
"""

QWEN = """{%- if tools %}
    {{- '<|s|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|e|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|s|>system\\n' + messages[0].content + '<|e|>\\n' }}
{%- endif %}
{%- set ns = namespace(in_tools=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.in_tools and message.role == "user" and message.content is string
        and not (message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.in_tools = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|s|>' + message.role + '\\n' + message.content + '<|e|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|s|>assistant\\n<think>\\n' + thought.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|s|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
                {{- call.arguments if call.arguments is string else call.arguments | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|e|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|s|>user' }}
        {%- endif %}
        {{- '\\n<r>\\n' + message.content + '\\n</r>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|e|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|s|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.items() if key != "return" %}
                    {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}
                    {%- else %}{{- '"' + key + '": ' + value | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception("Ids of calls have 9 characters!") }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] in ["tool_results", "tool"] %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Unknown role " + message["role"]) }}
    {%- endif %}
{%- endfor %}"""

DEEPSEEK = """{% if not add_generation_prompt is defined %}
{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_tool=false, system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system}}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<|User|>' + message['content']}}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<|Assistant|>' + content + eos_token}}{%- endif %}
{%- endfor -%}
{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|><think>\\n'}}{% endif %}"""

EXTENSIONS = """{% for message in messages %}
{% if loop.index0 == 3 %}{% break %}{% endif %}
{% if message.role == 'tool' %}{% continue %}{% endif %}
{% generation %}{% set inside = message.content %}
<{{ message.content | string | upper }}>{% endgeneration %}
{{ inside is defined }}{{ strftime_now('%Y-%m') }}
{% endfor %}
{{ dict(a=1, b=[2, '<é&">']) | tojson }}{{ dict.fromkeys([1]) }}
{{ {'z': 1, 'a': 2} | tojson(sort_keys=true) }}
{{ messages | map(attribute='role') | join(',') }}{{ messages | tojson(separators=(',', ':')) }}
"""

PARTS = """{% for message in messages %}{% if message.content is string %}[{{ message.content }}]
{%- else %}{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}
{% endfor %}"""

TEMPLATES = {
    "llama": LLAMA,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "extensions": EXTENSIONS,
    "parts": PARTS,
}

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather; \"quoted\" <b>é</b> & 'more'",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL: dict[str, Any] = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich <1>", "days": 2}},
}
SYSTEM = {"role": "system", "content": " Be short.\n"}
USER = {"role": "user", "content": '  Say <hi> & "é 😀"  '}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n Hi! "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "And?"}],
    "reasoning": [USER, {"role": "assistant", "content": "Hi", "reasoning_content": "why\n"}, USER],
    "call": [
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"sun": true}', "tool_call_id": "abcdef123"},
    ],
    "calls": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, USER],
    "continued": [SYSTEM, USER, {"role": "assistant", "content": "It is  "}],
}
