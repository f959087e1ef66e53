"""The code formats of table 11 in plain NumPy, from tables of all their values (design.md section 5)."""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# 0 .. 126: sixteen exponents of eight mantissas; the last code is NaN.
E4M3 = np.array([(m if e == 0 else 8 + m) * 2.0 ** (max(e, 1) - 10) for e in range(16) for m in range(8)][:127])


def nearest(values, table):
    """Codes of the nearest table entries, the even code on ties; a sign bit above the table's."""
    magnitude = np.abs(values)[..., None]
    distance = np.abs(magnitude - table)
    best = distance == distance.min(axis=-1, keepdims=True)
    even = best & (np.arange(len(table)) % 2 == 0)
    code = np.where(even.any(axis=-1), even.argmax(axis=-1), best.argmax(axis=-1))
    return code + np.signbit(values) * 2 ** int(np.ceil(np.log2(len(table))))


def value(codes, table):
    half = 2 ** int(np.ceil(np.log2(len(table))))
    return np.where(codes >= half, -1.0, 1.0) * table[codes % half]


def nvfp4(row, tensor_scale=False):
    """Unpacked codes, scale codes and decoded values of one row."""
    groups = row.astype(np.float64).reshape(-1, 16)
    amax = np.abs(groups).max(axis=1, keepdims=True)
    second = np.float32(np.abs(row).max() / 2688) if tensor_scale and row.any() else 1.0
    scales = nearest(amax / 6 / second, E4M3)
    step = value(scales, E4M3) * second
    codes = np.where(step > 0, nearest(groups / np.where(step > 0, step, 1), E2M1), 0)
    return codes.ravel(), scales.ravel(), (value(codes, E2M1) * step).ravel()


def mxfp4(row):
    groups = row.astype(np.float64).reshape(-1, 32)
    amax = np.abs(groups).max(axis=1, keepdims=True)
    exponent = np.where(amax > 0, np.floor(np.log2(np.where(amax > 0, amax, 1))) - 2, -124)
    codes = nearest(groups / 2.0**exponent, E2M1)
    return codes.ravel(), exponent.ravel() + 127, (value(codes, E2M1) * 2.0**exponent).ravel()


def per_row(row, largest):
    """The float32 scale of a row and the row divided by it, in float32."""
    scale = np.abs(row).max() / np.float32(largest)
    return scale, row / (scale if scale > 0 else np.float32(1))


def fp8(row):
    scale, ratio = per_row(row, 448)
    codes = nearest(ratio, E4M3)
    return codes, [scale], value(codes, E4M3) * scale


def int8(row):
    scale, ratio = per_row(row, 127)
    codes = np.clip(np.rint(ratio), -127, 127)
    return codes, [scale], codes * scale


def int2(row):
    scale, ratio = per_row(row, 1.5)
    outer = np.abs(ratio) > 1
    return 2 * (ratio < 0) + outer, [scale], np.where(ratio < 0, -1, 1) * np.where(outer, 1.5, 0.5) * scale
