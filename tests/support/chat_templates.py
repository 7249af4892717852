"""Chat templates of the shapes that public models have, each written for these tests.

They take, refuse and leave out what those take, refuse and leave out.
"""

_LOOP = "{% for message in messages %}"
_END = "{% endfor %}"
_RAISE_UNLESS_TURNS = (
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant') }}{% endif %}"
)
# Messages that are neither calls nor results take turns.
_TURNS_BESIDE_CALLS = (
    "{% set ns = namespace(index=0) %}" + _LOOP + "{% if message.role == 'user' or "
    "(message.role == 'assistant' and not message.tool_calls) %}"
    "{% if (message.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('after the optional system message, roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}" + _END
)
_HEAD = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
)
_QWEN_CALLS = (
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
_NINE = (
    "{% if call.id is not defined or call.id|length != 9 %}"
    "{{ raise_exception('ids of calls are nine letters and digits') }}{% endif %}"
)

TEMPLATES = {
    "chatml": _LOOP + "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n" + _END
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama 2": _HEAD + _LOOP + _RAISE_UNLESS_TURNS
    + "{% if loop.first and system %}{% set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' "
    "+ message.content %}{% else %}{% set text = message.content %}{% endif %}"
    "{% if message.role == 'user' %}{{ bos_token }}[INST] {{ text.strip() }} [/INST]"
    "{% else %} {{ text.strip() }} {{ eos_token }}{% endif %}" + _END,
    "llama 3.1": _HEAD + "<|start_header_id|>system<|end_header_id|>\n\n{{ system | trim }}"
    "<|eot_id|>" + _LOOP + "{% if message.tool_calls %}{% if message.tool_calls|length != 1 %}"
    "{{ raise_exception('This model takes single calls only') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "{{ call.name }}", '
    '"parameters": {{ call.arguments | tojson }}}<|eot_id|>'
    "{% elif message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ message.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endif %}" + _END
    + "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "gemma 1 and 2": "{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + _LOOP + _RAISE_UNLESS_TURNS
    + "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n" + _END
    + "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "gemma 3": "{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}"
    "{% else %}{% set first = '' %}{% endif %}" + _LOOP + _RAISE_UNLESS_TURNS
    + "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ first if loop.first else '' }}{% if message.content is string %}"
    "{{ message.content | trim }}{% else %}{% for part in message.content %}"
    "{{ part.text | trim }}{% endfor %}{% endif %}<end_of_turn>\n" + _END
    + "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "mistral 0.1": "{{ bos_token }}" + _LOOP + _RAISE_UNLESS_TURNS
    + "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}" + _END,
    "mistral 0.3": _HEAD + _TURNS_BESIDE_CALLS + _LOOP
    + "{% if message.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS] "
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] "
    "{{ system + '\n\n' if loop.last and system else '' }}{{ message.content }}[/INST]"
    "{% elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}" + _NINE
    + '{"name": "{{ call.function.name }}", "arguments": '
    '{{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% endfor %}]{{ eos_token }}{% elif message.role == 'assistant' %} "
    "{{ message.content }}{{ eos_token }}{% elif message.role == 'tool' %}"
    "{% set call = {'id': message.tool_call_id} %}" + _NINE
    + '[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ call.id }}"}'
    "[/TOOL_RESULTS]{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}"
    + _END,
    "mistral nemo": _HEAD + _TURNS_BESIDE_CALLS + _LOOP
    + "{% if message.role == 'user' %}[INST]{{ system + '\n\n' if loop.last and system else '' }}"
    "{{ message.content }}[/INST]{% elif message.tool_calls %}[TOOL_CALLS]["
    "{% for call in message.tool_calls %}" + _NINE + "{{ call.function | tojson }}{% endfor %}]"
    "{{ eos_token }}{% elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]"
    "{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}" + _END,
    "mistral small 3.2": _HEAD + "{{ bos_token }}[SYSTEM_PROMPT]{{ system }}[/SYSTEM_PROMPT]"
    + _TURNS_BESIDE_CALLS + _LOOP + "{% if message.role == 'user' %}[INST]{{ message.content }}"
    "[/INST]{% elif message.role == 'assistant' %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}" + _NINE + "[TOOL_CALLS]{{ call.function.name }}"
    "[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.tool_call_id }}[TOOL_CONTENT]"
    "{{ message.content }}[/TOOL_RESULTS]{% else %}"
    "{{ raise_exception('Only user, system, assistant and tool roles') }}{% endif %}" + _END,
    "phi 3": _LOOP + "{% if message.role == 'system' %}<|system|>\n{{ message.content }}<|end|>\n"
    "{% elif message.role == 'user' %}<|user|>\n{{ message.content }}<|end|>\n"
    "{% elif message.role == 'assistant' %}<|assistant|>\n{{ message.content }}<|end|>\n{% endif %}"
    + _END + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "phi 3 without a system": _LOOP + "{% if message.role == 'user' %}<|user|>\n"
    "{{ message.content }}<|end|>\n<|assistant|>\n{% elif message.role == 'assistant' %}"
    "{{ message.content }}<|end|>\n{% endif %}" + _END,
    "phi 4 mini": _LOOP + "<|{{ message.role }}|>{{ message.content }}"
    "{% if message.tool_calls %}<|tool_call|>{{ message.tool_calls | tojson }}<|/tool_call|>"
    "{% endif %}<|end|>" + _END + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "qwen 2.5": _LOOP + "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ message.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ message.role }}"
    "{% if message.content %}\n{{ message.content }}{% endif %}" + _QWEN_CALLS
    + "<|im_end|>\n{% endif %}" + _END
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "qwen 3": _LOOP + "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ message.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and message.reasoning_content %}<think>\n"
    "{{ message.reasoning_content.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}" + _QWEN_CALLS
    + "<|im_end|>\n{% endif %}" + _END
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "qwen 3.5": "{% set ns = namespace(asked=false) %}" + _LOOP
    + "{% if message.role == 'user' %}{% set ns.asked = true %}{% endif %}" + _END
    + "{% if not ns.asked %}{{ raise_exception('No user query in messages.') }}{% endif %}" + _LOOP
    + "{% if message.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endif %}"
    "{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}<think>\n{{ message.reasoning_content | default('') }}\n"
    "</think>\n\n{% endif %}{{ message.content | trim }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n{{ value }}\n"
    "</parameter>{% endfor %}</function></tool_call>{% endfor %}<|im_end|>\n{% endif %}" + _END
    + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "gpt-oss": "{% set ns = namespace(call=none) %}"
    "{% if messages[0].role in ('developer', 'system') %}"
    "{% set first = messages[0].content %}{% set messages = messages[1:] %}"
    "<|start|>developer<|message|># Instructions\n\n{{ first }}<|end|>{% endif %}" + _LOOP
    + "{% if message.role == 'assistant' %}{% if message.tool_calls %}"
    "{% set later = namespace(final=false) %}{% for row in messages[loop.index:] %}"
    "{% if row.role == 'assistant' and not row.tool_calls %}{% set later.final = true %}{% endif %}"
    "{% endfor %}{% if message.content and message.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking with calls') }}"
    "{% elif not later.final and (message.content or message.thinking) %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.content or message.thinking }}"
    "<|end|>{% endif %}{% set call = message.tool_calls[0].function %}"
    "{% set ns.call = call.name %}<|start|>assistant to=functions.{{ call.name }}<|channel|>"
    "commentary json<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% else %}{% if loop.last and message.thinking %}<|start|>assistant<|channel|>analysis"
    "<|message|>{{ message.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final"
    "<|message|>{{ message.content }}<|end|>{% set ns.call = none %}{% endif %}"
    "{% elif message.role == 'tool' %}{% if ns.call is none %}"
    "{{ raise_exception('a tool message without a call before it') }}{% endif %}"
    "<|start|>functions.{{ ns.call }} to=assistant<|channel|>commentary<|message|>"
    "{{ message.content | tojson }}<|end|>{% elif message.role == 'user' %}"
    "<|start|>user<|message|>{{ message.content }}<|end|>{% endif %}" + _END
    + "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "granite 3": _LOOP + "<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<|tool_call|>{{ call.function | tojson }}"
    "{% endfor %}"
    "<|end_of_text|>\n" + _END
    + "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
    "smollm3": _HEAD + "<|im_start|>system\n## Metadata\n\n## Custom Instructions\n\n{{ system }}"
    "<|im_end|>\n" + _LOOP + "{% set content = message.content if message.content is string "
    "else '' %}{% if message.role == 'user' %}<|im_start|>user\n{{ content }}<|im_end|>\n"
    "{% elif message.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ content }}"
    + _QWEN_CALLS + "<|im_end|>\n{% endgeneration %}{% elif message.role == 'tool' %}"
    "<|im_start|>user\n{{ content }}<|im_end|>\n{% endif %}" + _END
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "deepseek": "{% set ns = namespace(system='') %}" + _LOOP
    + "{% if message.role == 'system' %}{% set ns.system = ns.system + message.content + '\n' %}"
    "{% endif %}" + _END + "{{ bos_token }}{{ ns.system }}" + _LOOP
    + "{% if message.role == 'user' %}<｜User｜>{{ message.content }}{% endif %}"
    "{% if message.role == 'assistant' and message.content is none %}<｜Assistant｜>"
    "{% for call in message.tool_calls %}<｜tool▁call▁begin｜>{{ call.function.name }}\n"
    "{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' and message.content is not none %}<｜Assistant｜>"
    "{{ message.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}"
    "{% if message.role == 'tool' %}<｜tool▁output▁begin｜>{{ message.content }}"
    "<｜tool▁output▁end｜>{% endif %}" + _END
    + "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
    "command-r": _HEAD + "{{ bos_token }}{% if system %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>"
    "{{ system }}<|END_OF_TURN_TOKEN|>{% endif %}" + _LOOP + _RAISE_UNLESS_TURNS
    + "{% if message.role == 'user' %}<|START_OF_TURN_TOKEN|><|USER_TOKEN|>"
    "{{ message.content.strip() }}<|END_OF_TURN_TOKEN|>{% elif message.role == 'assistant' %}"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{{ message.content.strip() }}<|END_OF_TURN_TOKEN|>"
    "{% endif %}" + _END
    + "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
    "lfm2": _HEAD + "{{ bos_token }}{% if system or tools %}<|im_start|>system\n{{ system }}"
    "{% if tools %}List of tools: {{ tools | tojson }}{% endif %}<|im_end|>\n{% endif %}" + _LOOP
    + "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n" + _END
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "parts only": _LOOP + "<|{{ message.role }}|>{% for part in message.content %}{{ part.text }}"
    "{% endfor %}<|end|>" + _END,
}  # fmt: skip
