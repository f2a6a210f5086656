"""Short chat templates of our own that write tool calls and results as those of the families do. Real ones are in
`real_templates/`, where a licence allows it.

Only what matters to tool calls is here: how turns begin and end, how a call and its result are written, what happens to
thinking, and what the real templates require of messages (ids, names, JSON text as arguments).
"""

# ruff: noqa: E501 (templates are easier to read in long lines)
from __future__ import annotations

from posttrain.models.embedded import byte_tokenizer

TOOLS = "{% if tools %}OPEN{% for t in tools %}{{ t | tojson }}\n{% endfor %}CLOSE{% endif %}"
CHATML_RESULTS = (  # results of one turn stand together in a turn of the user
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
JSON_CALL = (
    '{{ "\n" }}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>"
)
XML_CALL = (
    "{{ '\n' }}<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>"
)


def chatml(call: str, *, before: str = "", opening: str = "", results: str = CHATML_RESULTS) -> str:
    """ChatML with these calls. `before` stands before the content of an assistant's turn, `opening` begins a new one."""
    return (
        TOOLS.replace("OPEN", "<|im_start|>system\n# Tools\n<tools>\n").replace("CLOSE", "</tools><|im_end|>\n")
        + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        + before
        + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        + call
        + "{% endfor %}<|im_end|>\n"
        + results
        + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n"
        + opening
        + "{% endif %}"
    )


def llama(call: str, end: str = "<|eot_id|>", header: str = "<|start_header_id|>{role}<|end_header_id|>\n\n") -> str:
    """Llama's turns: tools in the first one of the user, results as turns of `ipython`, one call at a time."""
    tag = lambda role: header.replace("{role}", role)  # noqa: E731
    return (
        "{% for m in messages %}{% if m.tool_calls %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}"
        "{% set c = m.tool_calls[0] %}" + tag("assistant") + call + end + "{% elif m.role in ('tool', 'ipython') %}"
        "" + tag("ipython") + "{{ m.content | tojson }}" + end + "{% else %}" + tag("{{ m.role }}") + ""
        "{% if tools and loop.first %}{{ tools | tojson }}\n{% endif %}{{ m.content | trim }}" + end + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}" + tag("assistant") + "{% endif %}"
    )


def mistral(call: str, first: str = "", results: str = "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]") -> str:
    """Mistral's turns: the assistant's end with </s>, ids have nine letters and digits, roles alternate."""
    return (
        "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
        "{{ raise_exception('an id has 9 characters') }}{% endif %}" + results + "{% elif m.tool_calls %}" + first + ""
        "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('an id has 9 characters') }}{% endif %}"
        + call
        + "{% endfor %}"
        + ("]" if first else "")
        + "</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )


def deepseek(call: str, separator: str = "") -> str:
    """DeepSeek's turns. Arguments are JSON text, which the template joins to its own."""
    return (
        "<｜begin▁of▁sentence｜>{% if tools %}## Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
        "{% else %}{% if loop.index0 and messages[loop.index0 - 1].role == 'user' %}<｜Assistant｜>" + separator + ""
        "{% endif %}{{ m.content or '' }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
        "<｜tool▁call▁begin｜>" + call + "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
        "<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role == 'user' %}<｜Assistant｜>" + separator + "{% endif %}"
    )


def glm(line: str) -> str:
    """GLM's turns have no end of their own: the model samples the token that begins the next one."""
    return (
        "[gMASK]<sop>{% if tools %}<|system|>\n# Tools\n<tools>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
        "</tools>{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
        "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
        "{% elif m.role == 'assistant' %}<|assistant|>\n<think></think>{{ '\n' + m.content if m.content else '' }}"
        "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ c.function.name }}" + line + ""
        "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>" + line + ""
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>" + line + "{% endfor %}</tool_call>{% endfor %}"
        "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


QWEN3_THINKING = (  # thinking is shown behind the last question alone, and there an empty one in the last turn alone
    "{% set ns = namespace(last=0) %}{% for q in messages %}{% if q.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if loop.last and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
)
GPT_OSS = (  # thinking, calls and answers are messages of their own; a result names the function of the last call
    "<|start|>system<|message|>You are a model.<|end|>"
    "{% if tools %}<|start|>developer<|message|># Tools\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% set ns = namespace(name=none) %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call in a message') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}{% set ns.name = c.name %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}{% if ns.name is none %}{{ raise_exception('no previous tool call') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
KIMI = (  # a call is its id, which has the name
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments if c.function.arguments is string else "
    "c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|im_system|>{{ m.name or m.role }}<|im_middle|>## Return of {{ m.tool_call_id }}\n"
    "{{ m.content }}{% else %}<|im_user|>user<|im_middle|>{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
MINIMAX = (
    "{% if tools %}]~!b[]~b]system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}[e~[\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}]~b]ai\n{{ m.content or '' }}{% if m.tool_calls %}"
    "{{ '\n' }}<minimax:tool_call>\n{% for c in m.tool_calls %}<invoke name=\"{{ c.function.name }}\">\n"
    '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">'
    "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>"
    "{% endif %}[e~[\n{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('a result needs a call') }}{% endif %}]~b]tool"
    "{% endif %}{{ '\n' }}<response>{{ m.content }}</response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}[e~[\n{% endif %}"
    "{% else %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n<think>\n{% endif %}"
)
NEMOTRON_2 = (  # the last turn of all ends in another way; there is an empty line behind it instead of one before
    TOOLS.replace("OPEN", "<SPECIAL_10>System\n").replace("CLOSE", "\n")
    + "{% for m in messages %}{% if m.role == 'assistant' %}<SPECIAL_11>Assistant\n{{ m.content or '' }}"
    "{% if m.tool_calls %}<TOOLCALL>[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{{ ", " if not loop.last }}'
    "{% endfor %}]</TOOLCALL>{% endif %}{{ '<SPECIAL_12>\n\n' if loop.last else '\n<SPECIAL_12>\n' }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<SPECIAL_11>User\n<TOOL_RESPONSE>["
    "{% endif %}{{ m.content }}{{ ', ' if not loop.last and messages[loop.index0 + 1].role == 'tool' else '' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}]</TOOL_RESPONSE>{% endif %}"
    "{% else %}<SPECIAL_11>User\n{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<SPECIAL_11>Assistant\n<think>\n{% endif %}"
)
KIMI_3 = (  # a turn is a message with three parts; the prompt opens the first one
    '{% if tools %}<|open|>message role="system"<|sep|>{{ tools | tojson }}<|close|>message<|sep|><|end_of_msg|>{% endif %}'
    "{% for m in messages %}<|open|>message role=\"{{ m.role }}\"<|sep|>{% if m.role == 'assistant' %}"
    "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>{{ m.content or '' }}<|close|>response<|sep|>"
    "{% if m.tool_calls %}<|open|>tools<|sep|>{% for c in m.tool_calls %}"
    '<|open|>call tool="{{ c.function.name }}" index="{{ loop.index }}"<|sep|>{% for k, v in c.function.arguments.items() %}'
    "<|open|>argument key=\"{{ k }}\" type=\"{{ 'string' if v is string else 'number' }}\"<|sep|>"
    "{{ v if v is string else v | tojson }}<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}"
    "<|close|>tools<|sep|>{% endif %}{% else %}{{ m.content }}{% endif %}<|close|>message<|sep|><|end_of_msg|>{% endfor %}"
    '{% if add_generation_prompt %}<|open|>message role="assistant"<|sep|><|open|>think<|sep|>{% endif %}'
)
MINIMAX_3 = (  # nested values are nested tags
    "{% macro xml(v) %}{% if v is mapping %}{% for k, one in v.items() %}]<]minimax[>[<{{ k }}>{{ xml(one) }}"
    "]<]minimax[>[</{{ k }}>{% endfor %}{% elif v is string %}{{ v }}{% elif v is iterable %}{% for one in v %}"
    "]<]minimax[>[<item>{{ xml(one) }}]<]minimax[>[</item>{% endfor %}{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    "{% if tools %}]~b]developer\n{{ tools | tojson }}[e~[\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}]~b]ai\n</mm:think>{{ m.content or '' }}{% if m.tool_calls %}"
    ']<]minimax[>[<tool_call>\n{% for c in m.tool_calls %}]<]minimax[>[<invoke name="{{ c.function.name }}">'
    "{{ xml(c.function.arguments) }}]<]minimax[>[</invoke>\n{% endfor %}]<]minimax[>[</tool_call>{% endif %}[e~[\n"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}]~b]tool{% endif %}"
    "{{ '\n' }}<response>{{ m.content }}</response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}[e~[\n{% endif %}"
    "{% else %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n{% endif %}"
)
HY_3 = (  # all tags have a suffix
    "<｜hy_begin_of_sentence｜>{% if tools %}# Tools\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<｜hy_Assistant｜><think:opensource></think:opensource>{{ m.content or '' }}"
    "{% if m.tool_calls %}<tool_calls:opensource>\n{% for c in m.tool_calls %}<tool_call:opensource>{{ c.function.name }}"
    "<tool_sep:opensource>\n{% for k, v in c.function.arguments.items() %}<arg_key:opensource>{{ k }}</arg_key:opensource>"
    "\n<arg_value:opensource>{{ v if v is string else v | tojson }}</arg_value:opensource>\n{% endfor %}"
    "</tool_call:opensource>\n{% endfor %}</tool_calls:opensource>{% endif %}<｜hy_eos｜>"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<tool_responses:opensource>\n{% endif %}"
    "<tool_response:opensource>\n{{ m.content }}\n</tool_response:opensource>\n"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}</tool_responses:opensource>{% endif %}"
    "{% else %}<｜hy_User｜>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜hy_Assistant｜><think:opensource>{% endif %}"
)
LLAMA_CALL = '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
PYTHONIC_CALL = (
    "[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %})]"
)
DEEPSEEK_CALL = "function<｜tool▁sep｜>{{ c.function.name }}\n```json\n{{ '' + c.function.arguments }}\n```"
MISTRAL_ITEM = (
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}"
)
COHERE = (  # calls are numbered through the conversation, and results name that number
    "{% macro number(id) %}{% set ns = namespace(at=0, found=false) %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id == id and not ns.found %}{{ ns.at }}{% set ns.found = true %}{% endif %}{% set ns.at = ns.at + 1 %}"
    "{% endfor %}{% endfor %}{% endmacro %}"
    "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{% if tools %}# Available Tools\n```json\n{{ tools | tojson }}\n```{% endif %}"
    "<|END_OF_TURN_TOKEN|>{% for m in messages %}{% if m.role == 'assistant' %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    "{% if m.tool_calls %}{% if m.tool_plan %}<|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|>{% endif %}<|START_ACTION|>["
    '{% for c in m.tool_calls %}{{ "\n    " }}{"tool_call_id": "{{ number(c.id) }}", "tool_name": "{{ c.function.name }}", '
    "\"parameters\": {{ c.function.arguments | tojson }}}{{ ',' if not loop.last }}{% endfor %}{{ '\n' }}]<|END_ACTION|>"
    "{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>"
    '<|START_TOOL_RESULT|>[{% endif %}{{ \'\n    \' }}{"tool_call_id": "{{ number(m.tool_call_id) }}", '
    '"results": {"0": {{ m.content | tojson }}}, "is_error": null}'
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '\n' }}]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>"
    "{% else %},{% endif %}{% else %}<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)


def functionary(call: str, end: str, answer: str = "", opening: str = "", role: str = "tool") -> str:
    """Functionary's turns, between Llama 3's marks. Arguments are JSON text."""
    tag = lambda role: f"<|start_header_id|>{role}<|end_header_id|>\n\n"  # noqa: E731
    return (
        "{% if tools %}" + tag("system") + "{{ tools | tojson }}<|eot_id|>{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}" + tag("assistant") + "{{ '" + answer + "' + m.content if m.content }}"
        "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}{{ '" + end + "' if m.tool_calls else '<|eot_id|>' }}"
        "{% elif m.role == 'tool' %}" + tag(role) + "{{ m.content }}<|eot_id|>"
        "{% else %}" + tag("{{ m.role }}") + "{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + tag("assistant") + opening + "{% endif %}"
    )


FUNCTIONARY_31 = functionary(
    "{% if c.function.name == 'python' %}{{ '<|python_tag|>' + c.function.arguments }}{% else %}"
    "{{ '<function=' + c.function.name + '>' + c.function.arguments + '</function>' }}{% endif %}",
    "<|eom_id|>", role="ipython",
)  # fmt: skip
FUNCTIONARY_32 = functionary(
    "{{ '>>>' + c.function.name + '\n' + c.function.arguments }}", "<|eot_id|>", ">>>all\\n", ">>>"
)
GIGACHAT_3 = (  # a call is a message of its own; one call in a turn
    "<s>{% if tools %}developer system<|role_sep|>\n{{ tools | tojson }}<|message_sep|>\n\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}assistant<|role_sep|>\n{{ m.content or '' }}{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call in a turn') }}{% endif %}{% set c = m.tool_calls[0] %}"
    '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}{% endif %}<|message_sep|>\n\n'
    "{% elif m.role == 'tool' %}function result<|role_sep|>\n{{ m.content | tojson }}<|message_sep|>\n\n"
    "{% else %}{{ m.role }}<|role_sep|>\n{{ m.content }}<|message_sep|>\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant<|role_sep|>\n{% endif %}"
)
GIGACHAT_31 = GIGACHAT_3.replace("<|message_sep|>\n\nfunction call<|role_sep|>\n", "<|function_call|>")
MINICPM_5 = (  # texts with marks stand in a CDATA section, other values as Python writes them
    '<function name="{{ c.function.name }}">{% for k, v in c.function.arguments.items() %}<param name="{{ k }}">'
    "{{ '<![CDATA[' + v + ']]>' if v is string and ('<' in v or '&' in v or '\n' in v) else v }}</param>{% endfor %}"
    "</function>"
)
GRANITE_20B = (
    "SYSTEM: {% for t in tools or [] %}<|function_call_library|>\n{{ t | tojson }}\n{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}ASSISTANT: {{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<function_call> {"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ '\n' if not loop.last }}{% endfor %}<|endoftext|>\n{% elif m.role == 'tool' %}FUNCTION RESPONSE: {{ m.content }}\n"
    "{% else %}{{ m.role | upper }}: {{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
INTERNLM_2 = (  # as in vLLM's template; the models' own shows no tools
    "{% if tools %}<|im_start|>system name=<|plugin|>\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>environment name=<|plugin|>\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}<|action_start|><|plugin|>\n"
    '{"name": "{{ c.function.name }}", "KEY": {{ c.function.arguments | tojson }}}<|action_end|>{% endfor %}<|im_end|>\n'
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LONGCAT = (
    "{% if tools %}# Tools\n{{ tools | tojson }}\n{% endif %}{% for m in messages %}{% if m.role == 'assistant' %} ASSISTANT:"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n' }}<longcat_tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</longcat_tool_call>{% endfor %}'
    "</longcat_s>{% elif m.role == 'tool' %} TOOL:{{ m.content }}{% else %} USER:{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)


def python_block(before: str, after: str, role: str) -> str:
    """ChatML with lines of Python between two marks."""
    return (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
        "{% if m.role == 'tool' %}<|im_start|>"
        + role
        + "\n{{ m.content }}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
        "{{ m.content or '' }}{% if m.tool_calls %}" + before + "{% for c in m.tool_calls %}{{ c.function.name }}("
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
        "{{ '\n' if not loop.last }}{% endfor %}" + after + "{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


SOLAR_OPEN = (  # the last turn is ended in another way if it has calls
    "{% if tools %}<|begin|>system<|content|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|begin|>assistant{% if m.tool_calls %}<|tool_calls|>{% for c in m.tool_calls %}"
    "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ c.function.name }}<|tool_call:args|>"
    "{{ c.function.arguments | tojson }}<|tool_call:end|>{% endfor %}<|calls|>"
    "{% else %}<|content|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|begin|>tool<|tool_response|>{% endif %}"
    "<|tool_response:begin|>{{ m.tool_call_id }}<|tool_response:result|>{{ m.content }}<|tool_response:end|>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>{% endif %}"
    "{% else %}<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
)

TEMPLATES: dict[str, tuple[str, str]] = {
    "Qwen2.5": (chatml(JSON_CALL), "hermes"),
    "Qwen3": (chatml(JSON_CALL, before=QWEN3_THINKING), "hermes"),
    "Qwen3-2507 Instruct": (chatml(JSON_CALL.removeprefix('{{ "\n" }}')), "hermes"),
    "Qwen3-2507 Thinking": (chatml(JSON_CALL, before=QWEN3_THINKING, opening="<think>\n"), "hermes"),
    "Hermes 3": (chatml(JSON_CALL, results="{% elif m.role == 'tool' %}<|im_start|>tool\n<tool_response>\n"
                        "{{ m.content }}\n</tool_response><|im_end|>\n")
                 .replace("{% if tools %}", "{% if true %}", 1), "hermes"),  # it cannot do without tools
    "SmolLM3": (chatml(JSON_CALL, before="<think>\n\n</think>\n", opening="<think>\n\n</think>\n"), "hermes"),
    "Qwen3-Coder": (chatml(XML_CALL), "qwen3_coder"),
    "Qwen3.5": (chatml(XML_CALL, before=QWEN3_THINKING, opening="<think>\n"), "qwen3_coder"),
    "Nemotron 3": (chatml(XML_CALL, before="<think></think>", opening="<think></think>"), "qwen3_coder"),
    "Llama 3.1": (llama(LLAMA_CALL), "llama3_json"),
    "Llama 3.3, ipython": (llama("<|python_tag|>" + LLAMA_CALL, "<|eom_id|>"), "llama3_json"),
    "Llama 3.2, pythonic": (llama(PYTHONIC_CALL), "llama_pythonic"),
    "Llama 4, pythonic": (llama("<|python_start|>" + PYTHONIC_CALL + "<|python_end|>", "<|eot|>",
                                "<|header_start|>{role}<|header_end|>\n\n"), "llama_pythonic"),
    "Mistral 7B v0.3": (mistral(MISTRAL_ITEM, "[TOOL_CALLS] [",
                                '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}'
                                "[/TOOL_RESULTS]"), "mistral"),
    "Mistral Small 3 (v7)": (mistral(MISTRAL_ITEM, "[TOOL_CALLS][",
                                     "[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"),
                             "mistral"),
    "Mistral Small 3.2 (v11)": (mistral("[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
                                        "{{ c.function.arguments | tojson }}"), "mistral"),
    "Magistral (v13)": (mistral("[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"), "mistral"),
    "DeepSeek-V3": (deepseek(DEEPSEEK_CALL), "deepseek_v3"),
    "DeepSeek-R1": (deepseek(DEEPSEEK_CALL, "<think>\n"), "deepseek_v3"),
    "DeepSeek-V3.1": (deepseek("{{ c.function.name }}<｜tool▁sep｜>{{ '' + c.function.arguments }}", "</think>"),
                      "deepseek_v3"),
    "GLM 4.5": (glm("\n"), "glm"),
    "GLM 4.7": (glm(""), "glm"),
    "gpt-oss": (GPT_OSS, "harmony"),
    "Kimi K2": (KIMI, "kimi_k2"),
    "MiniMax-M2": (MINIMAX, "minimax_m2"),
    "MiniMax-M3": (MINIMAX_3, "minimax_m3"),
    "Kimi K3": (KIMI_3, "kimi_k3"),
    "Hunyuan Hy3": (HY_3, "hy3"),
    "Nemotron Nano v2": (NEMOTRON_2, "nemotron_v2"),
    "Command A": (COHERE, "cohere"),
    "Command R7B": (COHERE.replace("{% if add_generation_prompt %}", "{% if true %}"), "cohere"),  # it always opens a turn
    "Functionary v3.1": (FUNCTIONARY_31, "functionary_v31"),
    "Functionary v3.2": (FUNCTIONARY_32, "functionary_v32"),
    "GigaChat 3": (GIGACHAT_3, "gigachat3"),
    "GigaChat 3.1": (GIGACHAT_31, "gigachat31"),
    "Granite 20B": (GRANITE_20B, "granite_20b_fc"),
    "InternLM2.5": (INTERNLM_2.replace("KEY", "parameters"), "internlm2"),
    "InternLM2, vLLM": (INTERNLM_2.replace("KEY", "arguments"), "internlm2"),
    "LongCat-Flash": (LONGCAT, "longcat"),
    "MiniCPM4": (python_block("<|tool_call_start|>\n```python\n", "\n```\n<|tool_call_end|>", "tool"), "minicpm"),
    "MiniCPM5": (chatml(MINICPM_5), "minicpm5"),
    "OLMo 3": (python_block("<function_calls>", "</function_calls>", "environment"), "olmo3"),
    "Solar Open": (SOLAR_OPEN, "solar_open"),
}  # fmt: skip
"""Family -> (template, the format that fits)."""

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|header_start|>", "<|header_end|>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<s>", "</s>",
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>", "<|observation|>", "<|start|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>",
    "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "]~b]", "[e~[", "]<]minimax[>[", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<|open|>", "<|close|>", "<|sep|>",
    "<|end_of_msg|>", "<｜hy_begin_of_sentence｜>", "<｜hy_User｜>", "<｜hy_Assistant｜>", "<｜hy_eos｜>",
    "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
    "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TOOL_RESULT|>",
    "<|END_TOOL_RESULT|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|function_call|>", "<|role_sep|>", "<|message_sep|>", "<|endoftext|>", "<|action_start|>", "<|action_end|>",
    "<|plugin|>", "</longcat_s>", "<|begin|>", "<|end|>", "<|content|>", "<|calls|>", "<|tool_calls|>",
    "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>", "<|tool_response|>",
    "<|tool_response:begin|>", "<|tool_response:result|>", "<|tool_response:end|>",
]  # fmt: skip


def tokenizer_of(family: str):
    """A byte tokenizer with the family's template, and every special token of any of them."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATES[family][0]
    if family.startswith("Command"):
        tokenizer.eos_token = "<|END_OF_TURN_TOKEN|>"
    return tokenizer
