"""The closed forms of APEX (arXiv 2506.03296), Equations 1 to 8.

Times are µs of one layer (or of all: only ratios matter). Rates N_G and N_C are decode rows per µs
of GPU and of CPU attention at the current contexts. `t_overlap` is the cycle of asymmetric
pipelining, where both sides overlap. NEO's T_ga0 includes prefill attention.
"""

from __future__ import annotations


def t_gpu_only(t_linear: float, t_attention: float) -> float:
    """Eq. 1: a layer on the GPU alone."""
    return t_linear + t_attention


def t_overlap(t_linear: float, t_attention: float) -> float:
    """Eq. 2: a layer of asymmetric pipelining; two sub-batches read the weights twice."""
    return 2 * t_linear + t_attention


def gpu_rows(n_g: float, t_attention: float) -> float:
    """Eq. 3: GPU decodes of an iteration, from the time that their attention takes."""
    return n_g * t_attention


def cpu_rows(n_c: float, t_linear: float, t_attention: float) -> float:
    """Eq. 4: CPU decodes that fit beside them, with the CPU busy for the whole cycle."""
    return n_c * t_overlap(t_linear, t_attention)


def asymmetric_wins(gpu: float, cpu: float, t_two: float, t_one: float) -> bool:
    """Eq. 5: `gpu + cpu` rows in an asymmetric cycle of `t_two` against `gpu` rows in `t_one`."""
    return (gpu + cpu) * t_one > gpu * t_two


def decode_threshold(t_linear: float, t_attention: float) -> float:
    """Eq. 6: asymmetric pipelining wins a decode-only iteration iff N_G / N_C is below this:
    2 T_l / T_a + 3 + T_a / T_l. Follows from Eq. 5 with Eq. 1 to 4; 5.8 to 7.5 for T_a / T_l
    between 0.5 and 1.5."""
    ratio = t_attention / t_linear
    return 2 / ratio + 3 + ratio


def t_overlap_prefill(
    t_linear_prefill: float, t_attention_prefill: float, t_linear: float, t_attention: float
) -> float:
    """Eq. 7: a cycle whose first sub-batch also holds prefill chunks. `t_linear_prefill`: linear
    layers of that sub-batch, `t_attention_prefill`: prefill attention; `t_linear`: of the second
    sub-batch, `t_attention`: decode attention."""
    return t_linear_prefill + t_attention_prefill + t_linear + t_attention


def asymmetric_wins_prefill(
    n_g: float,
    n_c: float,
    t_linear_prefill: float,
    t_attention_prefill: float,
    t_linear: float,
    t_attention: float,
) -> bool:
    """Eq. 8: whether asymmetric pipelining wins an iteration with prefill chunks.

    Both sides are decode rows per cycle. The paper divides the right side by T_a, where its Eq. 5
    divides by the whole iteration; as printed it would compare a rate per cycle with one per
    attention. Without chunks (T_l_pref = T_l, T_a_pref = 0) this is Eq. 5.
    """
    cycle = t_overlap_prefill(t_linear_prefill, t_attention_prefill, t_linear, t_attention)
    alone = t_linear_prefill + t_attention_prefill + t_attention
    return asymmetric_wins(gpu_rows(n_g, t_attention), n_c * cycle, cycle, alone)


def speedup_estimate(rho_c: float, rho_t: float) -> float:
    """S ~ rho_c rho_t: CPU over GPU attention rate, times the share of time spent decoding."""
    return rho_c * rho_t
