"""Models of transformers with random weights and few of them."""

import torch
import transformers

WINDOW = 6
TOKENS = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SIZES = {
    **TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
DEEPSEEK_V3 = {  # values have a head dim of their own
    "num_key_value_heads": 4,
    "head_dim": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
FULL, SLIDING = "full_attention", "sliding_attention"
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=9
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, sliding_window=WINDOW, layer_types=[SLIDING, FULL, SLIDING]
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=WINDOW
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=96,
        num_local_experts=2,
        no_rope_layers=[1, 0, 1],
        attention_chunk_size=WINDOW,
        attn_temperature_tuning=False,
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**{**SIZES, **DEEPSEEK_V3}),
    "gpt2": lambda: transformers.GPT2Config(**TOKENS, n_embd=64, n_layer=3, n_head=4, n_positions=128),
    "bloom": lambda: transformers.BloomConfig(**TOKENS, hidden_size=64, n_layer=3, n_head=4),
}


def make_model(name, **options):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.initializer_range = 0.3  # attention that looks at some tokens more than at others
    config.tie_word_embeddings = False  # or the likeliest token is often the last one again
    if name == "gemma2":  # whose softcap sdpa leaves out, the default of some versions of transformers
        options.setdefault("attn_implementation", "eager")
    return transformers.AutoModelForCausalLM.from_config(config, **options).eval()


def disadvantages(model, prompt, text):
    """How much less likely each token of a text is than the likeliest one, to the largest logit.

    Zero for a greedy text; otherwise what rounding did. The model is asked with attention of its own.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *text]], device=model.device)
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    finally:
        model.set_attn_implementation(before)
    chosen = logits.gather(1, torch.tensor(text, device=model.device)[:, None])[:, 0]
    return (logits.amax(1) - chosen) / logits.abs().amax(1)
