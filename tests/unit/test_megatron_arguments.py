"""Arguments of Megatron-LM as its users publish them; a flag that is not known is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullwire import UsageError
from fullwire.workloads.architecture_files import architecture

# The flags of published lists, shortened: examples/ and tests/functional_tests/ of Megatron-LM.
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 128 --train-samples 1000 --lr 1e-4 --min-lr 1e-5 "
    "--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --bf16 "
    "--init-method-std 0.01 --eval-iters 32 --save-interval 500 --no-load-optim "
    "--auto-detect-ckpt-format --dist-ckpt-strictness log_all --empty-unused-memory-level 1 "
    "--override-opt_param-scheduler --manual-gc --exit-duration-in-mins 230 --fp8-format hybrid "
    "--keep-fp8-transpose-cache --cp-comm-type p2p --use-distributed-optimizer "
)
ROTARY = "--position-embedding-type rope --rotary-base 10000 --rotary-percent 1.0 --no-rope-fusion "
LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention "
    "--untie-embeddings-and-output-weights --use-mcore-models " + ROTARY
)
MLA = (
    "--multi-latent-attention --qk-layernorm --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --kv-lora-rank 512 --rotary-scaling-factor 40 --mscale 1.0 "
    "--mscale-all-dim 1.0 --beta-fast 32 --beta-slow 1 --moe-grouped-gemm "
    "--original-max-position-embeddings 4096 "
)
ROUTED = (
    "--moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall "
    "--moe-router-pre-softmax --moe-router-dtype fp32 --moe-aux-loss-coeff 1e-4 "
    "--moe-shared-expert-overlap --expert-model-parallel-size 8 "
)
TORCHRUN = (
    "torchrun --nproc_per_node 8 --nnodes 4 --node_rank 0 --master_addr localhost "
    "--master_port 6000 examples/classes/pretrain_gpt.py "
)
LISTS = {
    # The vocabulary is GPT-2's, padded to 51,200 with 8 ranks of tensor parallelism.
    "gpt3-175b": TORCHRUN + "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 "
    "--seq-length 2048 --max-position-embeddings 2048 --attention-backend auto "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --vocab-file vocab.json "
    "--merge-file merges.txt --split 949,50,1 --fp16 --rampup-batch-size 16 16 5859375",
    "llama3-8b": TORCHRUN + LLAMA + TRAINING + "--num-layers 32 --hidden-size 4096 "
    "--ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 --kv-channels 128 "
    "--seq-length 8192 --max-position-embeddings 8192 --tiktoken-pattern v2 --vocab-size 128256 "
    "--use-rotary-position-embeddings --tensor-model-parallel-size 2 --sequence-parallel",
    "llama3.2-1b": LLAMA.replace("--untie-embeddings-and-output-weights", "")
    + "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 8192 "
    "--make-vocab-size-divisible-by 1 --use-rope-scaling --padded-vocab-size 128256 "
    "--use-rotary-position-embeddings --no-position-embedding --export-force-local-attention",
    "llama2-7b": LLAMA + TRAINING + "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 "
    "--num-attention-heads 32 --num-query-groups 32 --seq-length 4096 "
    "--max-position-embeddings 4096 --tokenizer-type Llama2Tokenizer --mock-data "
    "--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 4",
    "mixtral-8x7b": LLAMA + TRAINING + "--num-layers 32 --hidden-size 4096 "
    "--ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 --seq-length 4096 "
    "--max-position-embeddings 32768 --num-experts 8 --moe-router-topk 2 "
    "--moe-router-load-balancing-type aux_loss --moe-grouped-gemm --expert-model-parallel-size 8 "
    "--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --params-dtype bf16",
    "deepseek-v2-lite": LLAMA.replace("--group-query-attention ", "") + MLA + ROUTED
    + "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 "
    "--kv-channels 16 --num-experts 64 --moe-layer-freq ([0]+[1]*26) --moe-ffn-hidden-size 1408 "
    "--moe-router-topk 6 --moe-shared-expert-intermediate-size 2816 --seq-length 1024 "
    "--max-position-embeddings 1024 --make-vocab-size-divisible-by 3200 --vocab-size 102400",
    "deepseek-v3": LLAMA.replace("--group-query-attention ", "") + MLA + ROUTED + TRAINING
    + "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--q-lora-rank 1536 --num-experts 256 --moe-layer-freq [0]*3+[1]*58 "
    "--moe-ffn-hidden-size 2048 --moe-router-topk 8 --moe-router-num-groups 8 "
    "--moe-router-group-topk 4 --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 "
    "--moe-shared-expert-intermediate-size 2048 --seq-length 4096 "
    "--max-position-embeddings 163840 --make-vocab-size-divisible-by 1280 --vocab-size 129280 "
    "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 7",
    "kimi-k2": LLAMA.replace("--group-query-attention ", "") + MLA + ROUTED
    + "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 64 "
    "--q-lora-rank 1536 --num-experts 384 --moe-layer-freq [0]*1+[1]*60 "
    "--moe-ffn-hidden-size 2048 --moe-router-topk 8 --moe-router-enable-expert-bias "
    "--moe-shared-expert-intermediate-size 2048 --seq-length 4096 --trust-remote-code "
    "--max-position-embeddings 131072 --padded-vocab-size 163840 --moe-layer-recompute",
    "qwen2.5-7b": LLAMA + "--add-qkv-bias --num-layers 28 --hidden-size 3584 "
    "--ffn-hidden-size 18944 --num-attention-heads 28 --num-query-groups 4 --kv-channels 128 "
    "--seq-length 4096 --max-position-embeddings 32768 --tokenizer-type HuggingFaceTokenizer "
    "--padded-vocab-size 152064 --tensor-model-parallel-size 8 --no-bias-swiglu-fusion",
    "qwen3-0.6b": LLAMA.replace("--untie-embeddings-and-output-weights", "")
    + "--num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --num-attention-heads 16 "
    "--num-query-groups 8 --kv-channels 128 --qk-layernorm --seq-length 4096 "
    "--max-position-embeddings 40960 --make-vocab-size-divisible-by 1187 --vocab-size 151936",
    "qwen3-30b-a3b": LLAMA + "--qk-layernorm --num-layers 48 --hidden-size 2048 "
    "--ffn-hidden-size 6144 --num-attention-heads 32 --num-query-groups 4 --kv-channels 128 "
    "--moe-ffn-hidden-size 768 --moe-router-score-function softmax --moe-router-topk 8 "
    "--moe-layer-freq '([1]*48)' --num-experts 128 --moe-token-drop-policy probs "
    "--moe-permute-fusion --vocab-size 151936 --seq-length 4096 --max-position-embeddings 40960",
    "gpt-oss-20b": "--normalization RMSNorm --untie-embeddings-and-output-weights "
    "--num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64 "
    "--group-query-attention --num-query-groups 8 --kv-channels 64 --num-experts 32 "
    "--moe-ffn-hidden-size 2880 --moe-router-topk 4 --seq-length 4096 --quick-geglu "
    "--max-position-embeddings 40960 --padded-vocab-size 201088 --glu-linear-offset 1.0 "
    "--softmax-type learnable --window-attn-skip-freq 2 --window-size 127,0 --enable-gpt-oss "
    "--activation-func-clamp-value 7.0 --no-bias-gelu-fusion " + ROTARY,
    "nemotron4-15b": TRAINING + "--apply-layernorm-1p --squared-relu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-layers 32 --hidden-size 6144 "
    "--num-attention-heads 48 --group-query-attention --num-query-groups 8 --seq-length 4096 "
    "--max-position-embeddings 4096 --tensor-model-parallel-size 8 --decoupled-lr 5.0e-4 "
    "--tokenizer-library sentencepiece --vocab-size 256000 --async-save " + ROTARY,
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_a_published_list_describes_its_model(name: str) -> None:
    read, known = architecture(LISTS[name]), architecture(name)
    assert read.parameters == known.parameters
    assert read.active_parameters == known.active_parameters
    assert (read.window, read.full_every) == (known.window, known.full_every)


SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 "
)


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ("--tokenizer-type GPT2BPETokenizer", 50304),
        ("--tokenizer-type GPT2BPETokenizer --tensor-model-parallel-size 8", 51200),
        ("--tokenizer-type GPT2BPETokenizer --make-vocab-size-divisible-by 1", 50257),
        ("--vocab-file vocab.json --merge-file merges.txt", 50304),
        ("--tokenizer-type GPT2BPETokenizer --vocab-size 1000", 1024),
        ("--tokenizer-type TikTokenizer", 131072),
        ("--tokenizer-type NullTokenizer --vocab-size 128256", 128384),  # with its last token
        ("--padded-vocab-size 152064 --tensor-model-parallel-size 8", 152064),
    ],
)
def test_a_tokenizer_tells_its_vocabulary(flags: str, rows: int) -> None:
    assert architecture(SMALL + flags).vocab == rows


def test_a_vocabulary_that_nothing_tells_is_asked_for() -> None:
    with pytest.raises(UsageError, match="expected --vocab-size with it"):
        architecture(SMALL + "--tokenizer-type HuggingFaceTokenizer")


def test_a_path_at_the_end_of_a_list_is_no_name() -> None:
    assert architecture(SMALL + "--vocab-size 1000 --load /checkpoints/llama3-8b").layers == 2


def test_a_command_in_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("# GPT-3\n" + LISTS["gpt3-175b"].replace(" --", " \\\n  --"), encoding="utf-8")
    assert architecture(path).parameters == architecture("gpt3-175b").parameters


def test_a_flag_may_state_its_truth() -> None:
    model = architecture(SMALL + "--vocab-size 1000 --swiglu true --disable-bias-linear false")
    assert (model.is_gated, model.biases) == (True, "all")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--moe-latent-size 32 --num-experts 4", "got moe_latent_size: they may change"),
        ("--enable-hyper-connections", "got enable_hyper_connections: they may change"),
        ("--window-size 127,127", "window_size: expected keys before a query and 0 behind it"),
        ("--softmax-type other", "softmax_type: expected vanilla, off-by-one or learnable"),
        ("--heterogeneous-layers-config-path x.json", "got heterogeneous_layers_config_path"),
    ],
)
def test_a_flag_that_changes_the_model_is_refused_by_name(flags: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        architecture(f"{SMALL} --vocab-size 1000 {flags}")


def test_groups_of_queries_that_megatron_ignores_are_refused() -> None:
    """Megatron-LM reads their number only beside the flag, whose absence means full heads."""
    plain = LISTS["llama3-8b"].replace("--group-query-attention ", "")
    with pytest.raises(UsageError, match=r"num_query_groups: .*--group-query-attention .* 8 alone"):
        architecture(plain)
    full = architecture(plain.replace("--num-query-groups 8", "--num-query-groups 1"))
    assert full.kv_heads == full.heads == 32
