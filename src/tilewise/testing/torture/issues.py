"""The public reports that checks come from."""

_GITHUB = "https://github.com"

BATCH_OF_65536 = f"{_GITHUB}/Dao-AILab/flash-attention/issues/1786"
HEADS_OF_65536 = f"{_GITHUB}/pytorch/pytorch/issues/142228"
CUDNN_ONE_QUERY = f"{_GITHUB}/NVIDIA/cudnn-frontend/issues/1072"
EXPANDED = f"{_GITHUB}/Dao-AILab/flash-attention/pull/2189"
FEW_KEY_HEADS = f"{_GITHUB}/pytorch/pytorch/issues/193893"
LENGTH_OF_65536 = f"{_GITHUB}/pytorch/pytorch/issues/171389"
LSE_BELOW_88 = f"{_GITHUB}/pytorch/pytorch/issues/196678"
MEANS_AT_256 = f"{_GITHUB}/NVIDIA/TransformerEngine/issues/3216"
OFFSETS_OF_HEADS = f"{_GITHUB}/fla-org/flash-linear-attention/issues/1080"
OFFSETS_OF_ROWS = f"{_GITHUB}/thu-ml/SageAttention/issues/386"
PAST_WHOLE_TILES = f"{_GITHUB}/pytorch/pytorch/issues/153799"
SCALE_OF_ONE = f"{_GITHUB}/fla-org/flash-linear-attention/pull/1262"
SEGMENTS = f"{_GITHUB}/Dao-AILab/flash-attention/issues/2860"
SLOW_PRODUCER = f"{_GITHUB}/Dao-AILab/flash-attention/pull/2481"
TRANSPOSED = f"{_GITHUB}/Dao-AILab/flash-attention/pull/2777"
ZERO_LENGTH = f"{_GITHUB}/Dao-AILab/flash-attention/issues/2562"


def short(issue: str) -> str:
    """Return an address as people cite it: 'pytorch#196678'."""
    _, _, _, _, repository, _, number = issue.split("/")
    return f"{repository}#{number}"
