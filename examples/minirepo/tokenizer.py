"""The example policy's tokenizer: byte-level BPE, so any text can be encoded, plus Qwen3's special tokens.

The vocabulary is trained on what the example's conversations are made of. Names of functions and modules become single
tokens; the fixed lines of Qwen3's tool prompt are added as whole tokens, which keeps a small model's prompts short.
"""

import json
import random
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from examples.harness.scout import scout
from examples.minirepo import transcripts
from examples.minirepo.expert import CLEAN, Expert, Noise
from examples.minirepo.family import KINDS, make_task

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TOOL_PROMPT = [
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n",
    '{"name": <function-name>, "arguments": <args-json-object>}',
]
# One piece per escape, word, digit or run of punctuation; a space belongs to the word or digit behind it.
PIECES = r"\\n| ?[A-Za-z]+| ?[0-9]|\\|[^A-Za-z0-9\\]*[^A-Za-z0-9\\ ]| +(?=[A-Za-z0-9])|[^A-Za-z0-9\\]+"
VOCABULARY = 896

# Qwen3's conversation format without thinking, as its own template and the renderers package write it.
CHAT_TEMPLATE = """\
{%- set first = messages[0].content if messages and messages[0].role == 'system' else none -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' ~ (first ~ '\\n\\n' if first is not none else '') -}}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' -}}
{{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' -}}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' -}}
{%- elif first is not none -%}
{{- '<|im_start|>system\\n' ~ first ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' ~ (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- '\\n' if message.content or not loop.first else '' -}}
{{- '<tool_call>\\n{"name": "' ~ function.name ~ '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else (function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'user' or not loop.first -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
"""


def corpus(seed: int, tasks: int = 4000) -> list[str]:
    """What conversations are made of: boilerplate, instructions, workspace files and expert turns."""
    tools = [scout.BASH, scout.WRITE_FILE, scout.DELEGATE]
    texts = [transcripts.MINI_SYSTEM, transcripts.MINI_INSTANCE, transcripts.MINI_FORMAT_ERROR, "cat > <<'EOF'\\n EOF"]
    texts += [scout.SYSTEM, scout.SUMMARY_REQUEST, scout.SUMMARY_HEADER, "assistant\n", "user\n", "system\n", "\n\n"]
    texts += ["\n" + json.dumps(tool["function"]) for tool in [*tools, transcripts.MINI_BASH]]
    texts += ["error: invalid tool call. Use one of bash, write_file, delegate.", "[exit 1]", "(no output)"]
    texts *= 400
    rng = random.Random(seed)
    for i in range(tasks):
        task = make_task("heldout" if i % 5 == 0 else "train", i, KINDS[i % len(KINDS)])
        texts += [task.instruction, *(text[:60] for text in task.workspace.values())]
        opening = scout.opening(task.instruction)
        for noise, shell in ((CLEAN, False), (Noise(), False), (CLEAN, True)):
            expert = Expert(task, rng, noise, shell)
            texts += [expert.reply(opening, tools) for _ in range(4)]
            texts.append(expert.reply([*opening, {"role": "user", "content": scout.SUMMARY_REQUEST}], tools))
        texts += [f"wrote {file.path}" for file in task.files]
    return texts


def train_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Trains the tokenizer; the same seed gives the same vocabulary."""
    whole = "|".join(map(re.escape, SPECIALS + MARKUP))
    pieces = [piece for text in corpus(seed) for piece in re.split(whole, text) if piece]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = MARKUP + TOOL_PROMPT
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(added),
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=5,
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
