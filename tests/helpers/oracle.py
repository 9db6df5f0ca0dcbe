"""ULPD/1 payloads, slowly: the format's rules over Python integers and lists of bits. Shares no code with the codec."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """w bits per element, m mantissa bits, e exponent bits (0: unsigned)."""

    w: int
    m: int
    e: int

    def ordered(self, u: int) -> int:
        if not self.e or u < 1 << (self.w - 1):
            return u
        return (u ^ ((1 << (self.w - 1)) - 1)) - (1 << self.w)

    def difference(self, old: int, new: int) -> int:
        d = (self.ordered(new) - self.ordered(old)) % (1 << self.w)
        return d - (1 << self.w) if d >= 1 << (self.w - 1) else d

    def field(self, u: int) -> int:
        return (u >> self.m) & ((1 << self.e) - 1)


KINDS = {
    "bfloat16": Kind(16, 7, 8),
    "float16": Kind(16, 10, 5),
    "float32": Kind(32, 23, 8),
    "float8_e4m3fn": Kind(8, 3, 4),
    "float8_e5m2": Kind(8, 2, 5),
    "uint8": Kind(8, 0, 0),
}


def mix(z: int) -> int:
    z %= 1 << 64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % (1 << 64)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % (1 << 64)
    return z ^ (z >> 31)


def digest(seed: int, values: list[int], w: int, first: int = 0) -> int:
    return sum(mix(seed + 0x9E3779B97F4A7C15 * ((first + i << w) + u)) for i, u in enumerate(values)) % (1 << 64)


def code(v: int, k: int, full: int) -> list[int]:
    q = v >> k
    if q >= 24:
        return [0] * 24 + [(v >> b) & 1 for b in range(full)]
    return [0] * q + [1] + [(v >> b) & 1 for b in range(k)]


def best(values: list[int], ks: int, full: int) -> tuple[int, list[int]]:
    runs = [([bit for v in values for bit in code(v, k, full)], k) for k in range(ks)]
    bits, k = min(runs, key=lambda run: (len(run[0]), run[1]))
    return k, bits


def gaps(positions: list[int]) -> list[int]:
    return [b - a - 1 for a, b in zip([-1, *positions], positions, strict=False)]


def words(bits: list[int]) -> bytes:
    bits = bits + [0] * (-len(bits) % 32)
    return b"".join(
        sum(bit << i for i, bit in enumerate(bits[at : at + 32])).to_bytes(4, "little")
        for at in range(0, len(bits), 32)
    )


def signs_and_sizes(differences: list[int], w: int) -> tuple[int, list[int]]:
    signs = [int(d > 0) for d in differences]
    if all(abs(d) == 1 for d in differences):
        return 31, signs
    km, bits = best([abs(d) - 1 for d in differences], min(w - 1, 31), w)
    return km, signs + bits


def profile_a(kind: Kind, old: list[int], new: list[int]) -> bytes:
    changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    kg, bits = best(gaps(changed), 19, 18)
    km, rest = signs_and_sizes([kind.difference(old[i], new[i]) for i in changed], kind.w)
    return bytes([kg, km, 0, 0]) + words(bits + rest)


def profile_abs(kind: Kind, old: list[int], new: list[int]) -> bytes:
    changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    kg, bits = best(gaps(changed), 19, 18)
    values = [(new[i] >> b) & 1 for i in changed for b in range(kind.w)]
    return bytes([kg, 0, 0, 0]) + words(bits + values)


def profile_b(kind: Kind, old: list[int], new: list[int], lowest: int, classes: int) -> bytes:
    heads, stream, present = b"", [], 0
    of_class = [min(max(kind.field(u) - lowest, 0), classes - 1) for u in old]
    for c in range(classes):
        members = [i for i, found in enumerate(of_class) if found == c]
        ranks = [r for r, i in enumerate(members) if old[i] != new[i]]
        if not ranks:
            continue
        present |= 1 << c
        kg, bits = best(gaps(ranks), 19, 18)
        inverse = 0
        if 2 * len(ranks) > len(members):
            k, other = best(gaps([r for r in range(len(members)) if r not in set(ranks)]), 19, 18)
            if len(other) < len(bits):
                kg, bits, inverse = k, other, 1
        km, rest = signs_and_sizes([kind.difference(old[members[r]], new[members[r]]) for r in ranks], kind.w)
        heads += (len(ranks) | kg << 19 | km << 24 | inverse << 29).to_bytes(4, "little")
        stream += bits + rest
    return bytes([lowest, classes]) + present.to_bytes(2, "little") + heads + words(stream)


def smallest(kind: Kind, old: list[int], new: list[int], lowest: int, classes: int) -> tuple[int, bytes]:
    """(profile code, payload) among A, B, ABS and RAW, the lower code among equals."""
    raw = b"".join(u.to_bytes(kind.w // 8, "little") for u in new)
    raw += bytes(-len(raw) % 4)
    payloads = [
        (1, profile_a(kind, old, new)),
        (2, profile_b(kind, old, new, lowest, classes)),
        (3, profile_abs(kind, old, new)),
        (4, raw),
    ]
    return min(payloads, key=lambda pair: (len(pair[1]), pair[0]))
