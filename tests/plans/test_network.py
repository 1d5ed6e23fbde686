"""Networks from names and files, and invalid names and files."""

import json

import pytest

from fairseq_tutel.plans.network import NETWORKS, find, from_json, read, routed, to_json

EXAMPLES = ("dgx_a100:2", "dgx_h100:1", "mi250:2", "boxes:2x4:10:1", "cluster:2x2:40:1", "torus:4x4")


def test_every_named_network_can_be_written_and_read(tmp_path):
    assert {name.partition(":")[0] for name in EXAMPLES} == NETWORKS.keys()
    for name in EXAMPLES:
        network = find(name)
        (tmp_path / "network.json").write_text(json.dumps(to_json(network)))
        assert read(tmp_path / "network.json") == network, name
    assert len({find(name).digest for name in EXAMPLES}) == len(EXAMPLES)


def test_networks_have_the_shape_of_their_name():
    def widths(name):
        return sorted(link.bandwidth for link in find(name).links)

    assert widths("torus:1x2") == [1] * 2
    assert widths("torus:1x4") == [1] * 8
    assert widths("torus:4x4") == [1] * 64
    assert widths("cluster:2x2:40:1") == [1] * 4 + [40] * 8
    boxes = find("mi250:2")
    assert boxes.places == tuple(divmod(rank, 16) for rank in range(32))
    # A die has seven links of 50 GB/s, of which four lead to its neighbour, and InfiniBand.
    assert all(sum(row) == 366 and max(row) == 200 for row in boxes.matrix[:32])


def test_messages_between_gpus_of_a_box_use_the_fastest_route():
    loads = routed(find("mi250:2"), {(7, 8): 1})
    # Three links of at least 50 GB/s are faster than two links of 16 GB/s.
    assert len(loads) > 2 and all(vertex < 16 for link in loads for vertex in link)


def test_ranks_are_ordered_by_host_and_local_rank():
    data = to_json(find("boxes:2x2:3:1"))
    shuffled = from_json(data | {"gpus": data["gpus"][::-1], "links": data["links"][::-1]})
    assert shuffled.digest == find("boxes:2x2:3:1").digest != find("boxes:2x2:3:2").digest
    assert from_json(data | {"name": "other"}).digest == shuffled.digest


GPUS = [{"name": "a", "host": 0, "local": 0}, {"name": "b", "host": 0, "local": 1}]
LINKS = [["a", "b", 1], ["b", "a", 1]]
GOOD = {"format": 1, "gpus": GPUS, "links": LINKS}


@pytest.mark.parametrize(
    "data",
    [
        [],
        GOOD | {"format": 2},
        GOOD | {"links": None},
        GOOD | {"switches": ["s"] * 5000},
        GOOD | {"gpus": [{"name": "a"}]},
        GOOD | {"switches": ["a"]},
        GOOD | {"gpus": [GPUS[0], GPUS[0] | {"name": "b"}]},
        GOOD | {"links": [["a", "c", 1]]},
        GOOD | {"links": [["a", "a", 1]]},
        GOOD | {"links": [["a", "b", 0.5]]},
        GOOD | {"links": LINKS * 2},
        GOOD | {"links": [["a", "b", 2], ["b", "a", 1]]},
        GOOD | {"gpus": GPUS[:1], "links": []},
        GOOD | {"links": []},
    ],
)
def test_an_invalid_network_raises_a_one_sentence_error(data):
    assert from_json(GOOD).ranks == 2
    with pytest.raises(ValueError, match=r"^This is not a network: [^\n]+\.$"):
        from_json(data)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("dgx", "dgx is not a network; give the path of a JSON file or one of dgx_a100:BOXES, "),
        ("torus:4", "torus:4 is not a network; give torus:ROWSxCOLUMNS with whole numbers."),
        ("torus:-4x1", "torus:-4x1 is not a network; give torus:ROWSxCOLUMNS"),
        ("boxes:99x99:1:1", "boxes:99x99:1:1 has too many GPUs; give no more than 512."),
        ("torus:1x1", "This is not a network: it has fewer than two GPUs"),
        ("none.json", "none.json cannot be read as a network ("),
    ],
)
def test_unknown_names_raise_an_error(name, sentence):
    with pytest.raises(ValueError) as refused:
        find(name)
    assert str(refused.value).startswith(sentence)
