"""Mistakes planted in the kernels themselves: each must make a test of the backend fail.

`mutants.py DIR` writes a copy of the backend's sources there that holds them all, each behind a condition which the environment
(CUSIM_MISTAKE=NUMBER) makes true. run.py runs, for each, the tests that must fail then, in plain emulation.
"""
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOURCES = "gpu-worker/backend/cuda"

# Name, file, what stands there (once), what takes its place (@: this mistake is in force), tests of test_cuda_ops (or PROGRAM:), what it is.
MISTAKES = [
    ("no_barrier_after_sums", "gemv.cuh", "        }\n    __syncthreads();\n    finish_products<COLS>(args, p, block_row, results);\n}\n\n/*",
     "        }\n    if (!@)\n        __syncthreads();\n    finish_products<COLS>(args, p, block_row, results);\n}\n\n/*",
     "test_products_of_mixed*", "a block's sums are read without a barrier"),
    ("half_of_the_squares", "gemv.cuh", "fmaf(v[i], v[i], squares)", "fmaf(v[i], v[i], @ && i == 2 ? 0.0f : squares)", "test_products_do*", "a part of the sum of squares is dropped"),
    ("up_is_gate", "gemv.cuh", "multiply_floats<KIND, ROWS, COLS>(pass ?", "multiply_floats<KIND, ROWS, COLS>(pass && !@ ?", "test_products_do*", "gate takes the place of up"),
    ("up_not_scaled", "gemv.cuh", "load_sums(&results.sums[1][c][r], scale, up)", "load_sums(&results.sums[1][c][r], @ ? 1.0f : scale, up)", "test_products_do*", "up lacks the scale of the norm before it"),
    ("mean_of_the_parts", "gemv.cuh", "(float)(from.parts * GEMV_BLOCK_ROWS)", "(float)(from.parts * (@ ? 1 : GEMV_BLOCK_ROWS))", "test_products_do*", "the mean of the parts in place of the mean of the squares"),
    ("a_row_of_x_too_early", "gemv.cuh", "min((uint32_t)c, n - 1) * cols + k", "min((uint32_t)c, n - 1 - (@ && n > 1)) * cols + k", "test_products_do*", "the last row of x is the one before it"),
    ("reads_what_it_writes", "run.c", "products.next.acts = groups_scratch(cuda, cuda->acts_at ^ 1,", "products.next.acts = groups_scratch(cuda, cuda->acts_at ^ !@,", "test_products_do*", "blocks overwrite the int8 input of others"),
    ("scale_not_applied", "run.c", "if (cuda->scaled_of == op->x)", "if (!@ && cuda->scaled_of == op->x)", "test_products_do*", "the norm's scale is forgotten"),
    ("newest_token_from_pool", "attention.cuh", "stored_end = appends ? end - 1 : end", "stored_end = appends && !@ ? end - 1 : end", "test_attention*", "the newest token is read before it is stored, and counts twice"),
    ("newest_token_often", "attention.cuh", "k_scale, heads, token == 0, state)", "k_scale, heads, @ || token == 0, state)", "test_attention*", "the newest token counts once for each lane group"),
    ("zero_forgotten", "grouped.cuh", "(int32_t)(scale >> 16) * sum", "(@ ? 0 : (int32_t)(scale >> 16)) * sum", "test_cuda_grouped:test_grouped*", "a group's zero point is forgotten"),
    ("scale_of_another_row", "grouped.cuh", "acts.groups[(size_t)row * acts.n_groups].d", "acts.groups[(size_t)(@ ? 0 : row) * acts.n_groups].d", "test_cuda_grouped:test_grouped*", "every row of x takes the first one's scale"),
    ("stage_not_awaited", "grouped.cuh", "            cp_async_wait<1>();", "            if (!@)\n                cp_async_wait<1>();", "test_cuda_grouped:test_grouped*", "codes are multiplied before their copy has landed"),
    ("low_part_rounded_down", "device.cuh", "(q + 128) >> 8", "(q + (@ ? 0 : 128)) >> 8", "test_cuda_grouped:test_grouped*", "the high part of 16 bits is not the nearest"),
    ("form_of_the_other_kind", "run.c", "cuda->groups_form == form", "(@ || cuda->groups_form == form)", "test_cuda_grouped:test_each*", "a product reads activations rounded for another kind of matrix"),
    ("halves_not_exchanged", "attention.cuh", "odd ? raw.x : raw.z, 1)", "odd && !@ ? raw.x : raw.z, 1)", "test_attention*", "a lane of a pair gets the wrong half of the other's load"),
    ("scales_of_the_other", "attention.cuh", "out[0] = odd ? other : mine;", "out[0] = odd == !@ ? other : mine;", "test_attention*", "a pair of tokens take each other's scale"),
    ("newest_value_not_scaled", "attention.cuh", "v[i] *= v_scale;\n}", "v[i] *= @ ? 1.0f : v_scale;\n}", "test_attention*", "the newest token's int8 value lacks its scale"),
    ("newest_key_not_stored", "attention.cuh", "store_head<STORE>(kv.k,", "if (!@)\n            store_head<STORE>(kv.k,", "test_attention*", "the newest token's key is not appended"),
    ("scales_swapped_in_tiles", "attention.cuh", "scale_keys<KEYS>(shared.v_scale[stage], s)", "scale_keys<KEYS>(@ ? shared.k_scale[stage] : shared.v_scale[stage], s)", "test_attention*", "values take the scales of keys"),
    ("no_barrier_between_stages", "attention.cuh", "tile_values<D>(shared, stage, s, o);\n        __syncthreads();", "tile_values<D>(shared, stage, s, o);\n        if (!@)\n            __syncthreads();", "test_attention*", "keys are loaded over those that other warps still read"),
    ("scale_of_half_a_head", "kv.cuh", "int step = LANES / 2; step;", "int step = LANES / (@ ? 4 : 2); step;", "test_attention*", "the int8 scale sees half of the head"),
    ("fp8_overflows", "kv.cuh", "__nv_cvt_float_to_fp8(v[i], __NV_SATFINITE,", "__nv_cvt_float_to_fp8(v[i], @ ? __NV_NOSAT : __NV_SATFINITE,", "test_fp8*", "values above 448 become no number"),
    ("turned_by_one_pair", "rope.cuh", "first, turn[2 * i], turn[2 * i + 1])", "first, turn[2 * (@ ? i / 2 : i)], turn[2 * i + 1])", "test_attention*", "the cosine of another pair"),
    ("turns_backwards", "rope.cuh", "-mul_rn(other, sine)", "(@ ? 1.0f : -1.0f) * mul_rn(other, sine)", "test_attention*", "half of each pair turns the wrong way"),
    ("no_barrier_in_rope", "rope.cuh", "    __syncthreads();", "    if (!@)\n        __syncthreads();", "test_attention*", "keys are stored before they are turned"),
    ("window_one_short", "kv.cuh", "position + 1 - kv.window : 0", "position + 1 - kv.window + @ : 0", "test_attention*", "a row does not see the first position of its window"),
    ("window_ignored_in_tiles", "attention.cuh", "key >= start && key <= last", "(@ || key >= start) && key <= last", "test_attention*", "rows of a tile see what lies before their window"),
    ("splits_begin_at_0", "attention.cuh", "first = span.begin + blockIdx.y", "first = (@ ? 0 : span.begin) + blockIdx.y", "test_attention*", "splits of a window begin at the first key"),
    ("order_forgotten", "rows.cuh", "order ? order[c] : c", "order && !@ ? order[c] : c", "test_cuda_grouped:test_columns*", "columns are not gathered"),
    ("order_of_another", "run.c", "cuda->groups_order == order", "(@ || cuda->groups_order == order)", "test_cuda_grouped:test_columns*", "a product reads what was gathered for another"),
    ("mean_of_the_row", "rows.cuh", "warp_sum(sum) / (float)width", "warp_sum(sum) / (float)(@ ? cols : width)", "test_head*", "a head's norm divides by the row's width"),
    ("keys_turned_backwards", "rope.cuh", "-mul_rn(y, s)", "(@ ? 1.0f : -1.0f) * mul_rn(y, s)", "test_attention*", "the same, of prompts"),
]


def main():
    folder = os.path.join(sys.argv[1], SOURCES)
    os.makedirs(folder, exist_ok=True)
    for name in sorted(os.listdir(os.path.join(ROOT, SOURCES))):
        with open(os.path.join(ROOT, SOURCES, name), encoding="utf-8") as f:
            text = f.read()
        for number, (mistake, file, right, wrong, *_) in enumerate(MISTAKES):
            if file != name:
                continue
            if text.count(right) != 1:
                sys.exit(f"mutants.py: {mistake}: {name} has {text.count(right)} places of {right!r}")
            text = text.replace(right, wrong.replace("@", f"(planted_mistake() == {number})"))
        text = text.replace("#pragma once\n", '#pragma once\n#include "tests/cusim/mistake.h"\n', 1) if name == "layout.h" else text
        text = text.replace(SOURCES + "/", f"{sys.argv[1]}/{SOURCES}/") if not name.startswith("cu_port") else text
        path = os.path.join(folder, name)
        if not os.path.exists(path) or open(path, encoding="utf-8").read() != text:
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)


if __name__ == "__main__":
    main()
