"""What a random configuration is like, dimension by dimension, and which two levels no call can have at once."""

OPTIONS = ("bias", "mask_tensor", "alibi", "sinks", "softcap", "dropout_p", "max_logit", "documents")
ORDERS = ("bshd", "sbhd", "shbd", "hbsd", "hsbd")  # drawn in place of one another
EXCEPTIONS = ("prefix", "sink_tokens", "chunk")


def sign(one, other):
    return (one > other) - (one < other)


def levels(configuration):
    """What a configuration is like, dimension by dimension."""
    case = configuration.case
    dims = {f"{field} along {letter}": getattr(case, field)[i:i + 1]
            for field in ("bias", "mask_tensor") for i, letter in enumerate("bhqk")}
    there = {option: bool(getattr(case, option)) for option in OPTIONS} | {
        name: getattr(case.mask, name) is not None for name in EXCEPTIONS}
    return dims | there | {
        "dtype": configuration.dtype, "lse_grad": configuration.lse_grad, "shift": sign(configuration.shift, 0.0),
        "placement": configuration.placement, "batches": case.b > 1, "lengths": sign(case.sq, case.sk),
        "heads": "mha" if case.hq == case.hk else "mqa" if case.hk == 1 else "gqa", "dims": sign(case.d, case.dv),
        "odd": case.d % 2, "left": case.mask.left is None, "right": case.mask.right and 1,
        "layout": "bshd" if case.layout in ORDERS else case.layout,
        "alignment": case.mask.alignment, "alibi": case.alibi, "operand_dtype": case.operand_dtype,
        "scale": case.scale is None, "documents": case.documents, "storage": storage(case)}


def storage(case):
    """Which lengths are data, and whether sequences are packed."""
    if case.packed:
        return case.packed
    return " and ".join(side for side in "qk" if getattr(case, f"lengths_{side}") is not None)


def contradict(one, other):
    """Whether no call can be both.

    An operand is there along all dims or none; q, k and v that are slices of one tensor share their dims, and packed
    sequences are in one batch entry; a prefix is joined to a causal mask.
    """
    (name, value), (name_of_other, value_of_other) = one, other
    if name.split()[0] == name_of_other.split()[0]:
        return (not value) != (not value_of_other)
    values = {name: value, name_of_other: value_of_other}
    if values.get("prefix") and values.get("right", 0) != 0:
        return True
    if values.get("storage") in ("tight", "gaps") and "layout" in values:
        return values["layout"] not in ("bhsd", "bshd", "bhds", "moat")
    if values.get("dims", 0) != 0:
        return str(values.get("layout")).startswith("packed")
    return values.get("layout") == "packed_qkv" and values.get("lengths", 0) != 0
