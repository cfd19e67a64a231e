"""Model files of every supported geometry against a plain numpy model in f64, and files that must be refused by name."""
import os
import subprocess
import sys

import numpy as np
import pytest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tools"))
import hostile_gguf  # noqa: E402
from toy_model import Shape, Tensor, encode, llama3_rope_freqs, random_model  # noqa: E402

BUILD = os.environ.get("B", "build")
LENGTH, FIRST = 60, 0


def run(path, ids, tmp_path, isa="auto"):
    """The tool's finished process, and log-probabilities of ids 0..63 [positions, 64]."""
    files = [str(tmp_path / name) for name in ("ids", "picks", "out")]
    np.asarray(ids, "<u4").tofile(files[0])
    np.tile(np.arange(64, dtype="<u4"), len(ids) - FIRST).tofile(files[1])
    done = subprocess.run([f"{BUILD}/tests/tools/logits", str(path), *files, str(len(ids)), str(FIRST), isa, "2", "17", "f16"], capture_output=True,
                          text=True, timeout=300)
    return done, np.fromfile(files[2], "<f4").reshape(-1, 66)[:, :64].astype(np.float64) if done.returncode == 0 else None


def refused(path, tmp_path):
    done, _ = run(path, [1, 2, 3], tmp_path)
    assert done.returncode == 1, done.stderr  # an error, not a crash
    return done.stderr


def rotate(x, frequencies, style):
    angle = np.arange(len(x))[:, None, None] * frequencies
    cos, sin, out = np.cos(angle), np.sin(angle), np.empty_like(x)
    half = x.shape[-1] // 2
    a, b = (slice(0, None, 2), slice(1, None, 2)) if style == "llama" else (slice(0, half), slice(half, None))
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., a] * sin + x[..., b] * cos
    return out


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def reference(tensors, shape, ids, factor=1.0, divisors=None):
    """Log-probabilities [positions, vocabulary] by the model's definition. tensors: F32 only."""
    w = {t.name: np.frombuffer(t.data, "<f4").astype(np.float64).reshape(t.dims[::-1]) for t in tensors}
    dim, n, eps = shape.head, len(ids), shape.eps
    frequencies = shape.rope_base ** (-2 * np.arange(dim // 2) / dim) / factor / (np.array(divisors) if divisors else 1)
    x = w["token_embd.weight"][ids]
    for layer in range(shape.layers):
        at = lambda name: w.get(f"blk.{layer}.{name}", 0)  # noqa: E731
        y = norm(x, at("attn_norm.weight"), eps)
        heads = lambda name: (y @ at(f"{name}.weight").T + at(f"{name}.bias")).reshape(n, -1, dim)  # noqa: E731
        q, k = rotate(heads("attn_q"), frequencies, shape.arch), rotate(heads("attn_k"), frequencies, shape.arch)
        k, v = (np.repeat(t, shape.heads // shape.kv_heads, 1) for t in (k, heads("attn_v")))
        scores = np.einsum("ihd,jhd->hij", q, k) / dim ** 0.5 + np.triu(np.full((n, n), -np.inf), 1)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        x = x + np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v).reshape(n, -1) @ at("attn_output.weight").T
        y = norm(x, at("ffn_norm.weight"), eps)
        gate = y @ at("ffn_gate.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ at("ffn_up.weight").T)) @ at("ffn_down.weight").T
    logits = norm(x, w["output_norm.weight"], eps) @ w.get("output.weight", w["token_embd.weight"]).T
    return logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)


def build(path, shape, **options):
    kept = []
    vocab = random_model(path, shape=shape, edit=lambda tensors: kept.extend(tensors) or tensors, **options)
    ids = [(i * 37 + 11) % len(vocab) for i in range(LENGTH)]
    return kept, ids


GEOMETRIES = {
    "llama": (Shape(), {}),
    "one kv head": (Shape(heads=4, kv_heads=1), {}),
    "head_dim above hidden / heads": (Shape(hidden=64, heads=4, kv_heads=2, head_dim=32), {}),
    "hidden no multiple of 32": (Shape(hidden=48, heads=3, kv_heads=3, head_dim=16, ffn=80), {}),
    "qwen2": (Shape(arch="qwen2", head_dim=32), {}),
    "tied": (Shape(tied=True), {}),
    "padded vocabulary": (Shape(rows=640), {}),
    "linear": (Shape(rope_scaling={"type": "linear", "factor": 2.0}), {"factor": 2.0}),
    "llama3": (Shape(rope_freqs=llama3_rope_freqs(16, 10000.0, original=64)), {"divisors": llama3_rope_freqs(16, 10000.0, original=64)}),
    "scaling none": (Shape(rope_scaling={"type": "none"}), {}),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_geometry_equals_the_plain_model(name, tmp_path):
    shape, scaling = GEOMETRIES[name]
    tensors, ids = build(tmp_path / "m.gguf", shape)
    want = reference(tensors, shape, ids, **scaling)[FIRST:, :64]
    done, got = run(tmp_path / "m.gguf", ids, tmp_path)
    assert done.returncode == 0, done.stderr
    assert np.abs(got - want).max() < 0.02  # KV is f16; the random logits spread over 20 and more
    if scaling:  # the scaling is seen: without it the far positions are elsewhere
        assert np.abs(got - reference(tensors, shape, ids)[FIRST:, :64])[-10:].max() > 0.05


def test_an_output_matrix_equal_to_the_embedding_gives_the_tied_models_logits(tmp_path):
    tensors, ids = build(tmp_path / "tied.gguf", Shape(tied=True))
    embedding = next(t for t in tensors if t.name == "token_embd.weight")
    extra = [Tensor("output.weight", embedding.dims, embedding.type, embedding.data)]
    build(tmp_path / "both.gguf", Shape(tied=True), extra=extra)
    results = [run(tmp_path / name, ids, tmp_path)[1] for name in ("tied.gguf", "both.gguf")]
    assert np.array_equal(*results)


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight", "blk.1.attn_norm.weight"])
def test_a_missing_tensor_is_named(name, tmp_path):
    build(tmp_path / "m.gguf", Shape(), drop=(name,))
    assert f"tensor {name} is missing" in refused(tmp_path / "m.gguf", tmp_path)


def test_a_missing_qwen2_bias_is_named(tmp_path):
    build(tmp_path / "m.gguf", Shape(arch="qwen2"), drop=("blk.1.attn_k.bias",))
    assert "tensor blk.1.attn_k.bias is missing" in refused(tmp_path / "m.gguf", tmp_path)


def test_unknown_tensors_are_warned_about_outside_layers_and_refused_inside(tmp_path):
    def extra(name):
        return [Tensor(name, [4], "F32", encode("F32", [1.0] * 4))]
    _, ids = build(tmp_path / "m.gguf", Shape(), extra=extra("speaker.weight"))
    done, _ = run(tmp_path / "m.gguf", ids, tmp_path)
    assert done.returncode == 0 and "speaker.weight" in done.stderr
    build(tmp_path / "m.gguf", Shape(), extra=extra("blk.0.attn_sinks.weight"))
    assert "blk.0.attn_sinks.weight" in refused(tmp_path / "m.gguf", tmp_path)


@pytest.mark.parametrize("scaling,word", [
    ({"type": "yarn", "factor": 4.0}, "yarn"), ({"type": "foo"}, "foo"), ({"type": "llama3", "factor": 8.0}, "rope_freqs.weight"),
    ({"type": "linear", "factor": 0.0}, "factor"), ({"type": "longrope", "factor": 2.0}, "longrope"),
])
def test_unknown_rope_scaling_is_refused_by_name(scaling, word, tmp_path):
    build(tmp_path / "m.gguf", Shape(rope_scaling=scaling))
    assert word in refused(tmp_path / "m.gguf", tmp_path)


@pytest.mark.parametrize("metadata,word", [
    ({"llama.attention.head_count_kv": ("u32", 3)}, "4 heads are not divisible by 3 kv heads"),
    ({"llama.attention.head_count": ("u32", 0)}, "llama.attention.head_count is 0"),
    ({"llama.attention.head_count": None}, "llama.attention.head_count is missing"),
    ({"llama.attention.value_length": ("u32", 32)}, "value length 32 differs from key length 16"),
    ({"llama.block_count": ("u32", 3)}, "tensor blk.2.attn_norm.weight is missing"),
    ({"llama.block_count": ("u32", 1)}, "blk.1."),
    ({"llama.block_count": ("u32", 4000000000)}, "llama.block_count"),
    ({"llama.embedding_length": ("u32", 128)}, "token_embd.weight"),
    ({"llama.rope.dimension_count": ("u32", 18)}, "rope.dimension_count 18"),
    ({"llama.expert_count": ("u32", 8)}, "mixture-of-experts"),
    ({"llama.attention.layer_norm_rms_epsilon": ("f32", float("nan"))}, "layer_norm_rms_epsilon"),
    ({"general.architecture": ("str", "mamba")}, "mamba"),
    ({"general.architecture": None}, "general.architecture"),
])
def test_bad_geometry_is_refused_with_both_numbers(metadata, word, tmp_path):
    build(tmp_path / "m.gguf", Shape(), metadata=metadata)
    assert word in refused(tmp_path / "m.gguf", tmp_path)


@pytest.mark.parametrize("case", list(hostile_gguf.refused()), ids=lambda case: case.name)
def test_files_that_lie_are_refused_with_a_reason(case, tmp_path):
    (tmp_path / "m.gguf").write_bytes(case.bytes)
    text = refused(tmp_path / "m.gguf", tmp_path)
    for word in case.words:
        assert word in text, text


def test_files_that_may_load_mean_what_they_say(tmp_path):
    cases = {case.name: case for case in hostile_gguf.loading()}
    logits = {}
    for name, case in cases.items():
        (tmp_path / "m.gguf").write_bytes(case.bytes)
        done, logits[name] = run(tmp_path / "m.gguf", [(i * 37 + 11) % 256 for i in range(LENGTH)], tmp_path)
        assert done.returncode == 0 and np.isfinite(logits[name]).all(), (name, done.stderr)
    for name, case in cases.items():
        assert not case.same_as or np.array_equal(logits[name], logits[case.same_as]), name
        assert not case.differs_from or not np.array_equal(logits[name], logits[case.differs_from]), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_every_format_loads_and_gives_the_same_bits_on_every_instruction_set(kind, tmp_path):
    """The attention of AMX has bits of its own: "auto" may be that, and then is only near."""
    shape = Shape(hidden=256, heads=4, kv_heads=2, ffn=256)
    _, ids = build(tmp_path / "m.gguf", shape, types=kind)
    results = []
    for isa in ("avx512", "avx2", "generic"):
        done, got = run(tmp_path / "m.gguf", ids[:20], tmp_path, isa)
        if "which this CPU lacks" not in done.stderr:
            assert done.returncode == 0, done.stderr
            results.append(got)
    assert np.isfinite(results[0]).all()
    assert all(np.array_equal(results[0], other) for other in results[1:])
    auto = run(tmp_path / "m.gguf", ids[:20], tmp_path)[1]
    assert np.abs(auto - results[0]).max() <= 0.01 * np.abs(results[0]).max()
