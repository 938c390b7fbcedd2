"""What ranks do in the tests of Transformers under context parallel: tiny models, on shards and as a whole."""

import copy

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad

from distributed.behaviour import message_of
from distributed.equality import group_of
from integrations.models import model
from tilewise.distributed import positions, shard
from tilewise.integrations.transformers_context_parallel import register

LENGTH = 24
ENDS = torch.tensor([0, 7, 15, LENGTH], dtype=torch.int32)
IDS = torch.randint(2, 61, (2, LENGTH), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(2, 61, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def given_name(mesh, layout):
    name = f"tilewise_of_{'x'.join(map(str, mesh.shape))}_{layout}"
    register(mesh, layout, name=name)
    return name


def outcome(net, implementation, given, labels, count):
    """Return a model's loss, the sum of its tokens' by their number on all ranks, and its gradients in a row."""
    net.set_attn_implementation(implementation)
    net.zero_grad()
    logits = net(**given, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def compare(mesh, name, layout, packed):
    """Return the differences of loss and gradients from those of one process, by the largest of them."""
    net, rows = copy.deepcopy(model(name)), 1 if packed else 2
    ids, labels, whole = IDS[:rows], LABELS[:rows], torch.arange(LENGTH)
    if packed:
        whole = whole - ENDS[torch.searchsorted(ENDS, whole, right=True) - 1]
    wanted = outcome(net, "eager", {"input_ids": ids, "position_ids": whole[None].expand(rows, -1)}, labels,
                     labels.numel())
    own = positions(mesh, length=LENGTH, layout=layout)
    given = {"input_ids": shard(ids, mesh, dim=1, layout=layout), "position_ids": whole[own][None].expand(rows, -1)}
    if packed:
        given |= {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}
    found = outcome(net, given_name(mesh, layout), given, shard(labels, mesh, dim=1, layout=layout), labels.numel())
    for one in found:
        dist.all_reduce(one, group=group_of(mesh))
    return [float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted, strict=True)]


def own_loss(mesh):
    """Return the difference of the loss that a model computes itself from labels that were shifted before."""
    net = copy.deepcopy(model("llama"))
    net.set_attn_implementation("eager")
    shifted = pad(IDS[:, 1:], (0, 1), value=-100)
    wanted = net(input_ids=IDS, labels=IDS, use_cache=False).loss.detach()
    net.set_attn_implementation(given_name(mesh, "zigzag"))
    ids, labels = (shard(one, mesh, dim=1, layout="zigzag").contiguous() for one in (IDS, shifted))
    count = (shifted != -100).sum()
    loss = net(input_ids=ids, position_ids=positions(mesh, length=LENGTH, layout="zigzag")[None], labels=labels,
               shift_labels=labels, num_items_in_batch=count, use_cache=False).loss.detach()
    dist.all_reduce(loss, group=group_of(mesh))
    return float(loss - wanted)


def refusals(mesh):
    """Return the errors of what is not taken, by name."""
    name = given_name(mesh, "zigzag")
    ids = shard(IDS, mesh, dim=1, layout="zigzag")
    own = positions(mesh, length=LENGTH, layout="zigzag")[None]
    nets = {one: copy.deepcopy(model(one)) for one in ("llama", "llama4_chunks", "t5_position_bias")}
    for net in nets.values():
        net.set_attn_implementation(name)

    def call(net="llama", **changed):
        given = {"input_ids": ids, "position_ids": own, "use_cache": False} | changed
        return message_of(lambda: nets[net](**{key: value for key, value in given.items() if value is not None}))

    whole = torch.arange(LENGTH)
    within = (whole - ENDS[torch.searchsorted(ENDS, whole, right=True) - 1])[own]
    lengths = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}
    cache = nets["llama"](input_ids=ids, position_ids=own, use_cache=True).cache
    return {
        "left_out": call(position_ids=None),
        "contiguous": call(position_ids=positions(mesh, length=LENGTH, layout="contiguous")[None]),
        "one_length": call(position_ids=within, cu_seq_lens_q=ENDS),
        "two_lengths": call(position_ids=within, cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS.clone()),
        "not_within": call(**lengths, input_ids=ids[:1]), "batch": call(position_ids=within.expand(2, -1), **lengths),
        "chunks": call("llama4_chunks", position_ids=within, input_ids=ids[:1], **lengths),
        "padding": call(attention_mask=torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)),
        "all_tokens": call(attention_mask=torch.ones_like(ids)),
        "four_dims": call(attention_mask=torch.ones(2, 1, 12, 12, dtype=torch.bool)),
        "probabilities": call(output_attentions=True), "unknown": call(sharpness=2.0),
        "cache": call(cache=cache, use_cache=True),
        "bias": message_of(lambda: nets["t5_position_bias"](input_ids=ids, decoder_input_ids=ids, use_cache=False)),
        "name": message_of(lambda: register(mesh, "zigzag", name="flash")),
        "layout": message_of(lambda: register(mesh, "striped")),
        "mesh": message_of(lambda: register(None, "zigzag")),
    }


def sharded_llama(mesh):
    """Return a model, and what it is called with."""
    net = copy.deepcopy(model("llama"))
    net.set_attn_implementation(given_name(mesh, "zigzag"))
    return net, {"input_ids": shard(IDS, mesh, dim=1, layout="zigzag"), "use_cache": False,
                 "position_ids": positions(mesh, length=LENGTH, layout="zigzag")[None]}


def packed_alone(mesh):
    """Return the error of position ids that begin anew, without lengths."""
    net, given = sharded_llama(mesh)
    given["position_ids"] = given["position_ids"] - ENDS[torch.searchsorted(
        ENDS, given["position_ids"], right=True) - 1]
    return message_of(lambda: net(**given))


def padding_of_one(mesh):
    """Return the error where the last rank alone has padding, of a kind of call that is new to the ranks."""
    net, given = sharded_llama(mesh)
    marked = torch.ones_like(given["input_ids"])
    marked[:, -1] = mesh.get_local_rank() < mesh.size() - 1
    return message_of(lambda: net(**given, attention_mask=marked))
