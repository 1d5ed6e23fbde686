"""Networks: names and files of them, and what is refused."""

import json

import pytest

from fairseq_tutel.plans.network import NETWORKS, find, from_json, read, routed, to_json

EXAMPLES = ("dgx_a100:2", "dgx_h100:1", "mi250:2", "boxes:2x4:10:1", "cluster:2x2:40:1", "torus:4x4")


def test_every_name_is_a_network_that_can_be_written_and_read(tmp_path):
    assert {name.partition(":")[0] for name in EXAMPLES} == NETWORKS.keys()
    for name in EXAMPLES:
        network = find(name)
        (tmp_path / "network.json").write_text(json.dumps(to_json(network)))
        assert read(tmp_path / "network.json") == network, name
    assert len({find(name).digest for name in EXAMPLES}) == len(EXAMPLES)


def test_shapes_are_what_their_names_say():
    def widths(name):
        return sorted(link.bandwidth for link in find(name).links)

    assert widths("torus:1x2") == [1] * 2
    assert widths("torus:1x4") == [1] * 8
    assert widths("torus:4x4") == [1] * 64
    assert widths("cluster:2x2:40:1") == [1] * 4 + [40] * 8
    boxes = find("mi250:2")
    assert boxes.hosts == {0: [*range(16)], 1: [*range(16, 32)]}
    # Seven links of 50 GB/s a die, four of them to its neighbour, and InfiniBand.
    assert all(sum(row) == 366 and max(row) == 200 for row in boxes.matrix[:32])


def test_messages_in_a_box_stay_in_it_where_that_is_faster():
    loads = routed(find("mi250:2"), {(7, 8): 1})
    # Over three links of 100, 50 and 50 GB/s or more instead of two of 16.
    assert len(loads) > 2 and all(vertex < 16 for link in loads for vertex in link)


def test_ranks_are_in_the_order_of_host_and_local_rank():
    data = to_json(find("boxes:2x2:3:1"))
    shuffled = from_json(data | {"gpus": data["gpus"][::-1], "links": data["links"][::-1]})
    assert shuffled.digest == find("boxes:2x2:3:1").digest != find("boxes:2x2:3:2").digest
    assert from_json(data | {"name": "other"}).digest == shuffled.digest
    assert shuffled.reversed.reversed == shuffled


GPU = {"name": "a", "host": 0, "local": 0}
GPUS = [GPU, {"name": "b", "host": 0, "local": 1}]
LINKS = [["a", "b", 1], ["b", "a", 1]]
REFUSED = {
    "no object": ([], "it is not a JSON object"),
    "format": ({"format": 2}, "its format is 2; give format 1"),
    "unknown": ({"speed": 1}, "it has unknown fields; remove ['speed']"),
    "links": ({"links": None}, "it has no list of links"),
    "switches": ({"switches": [1]}, "its switches are not a list of names"),
    "many": ({"switches": ["s"] * 5000}, "it has 5,002 vertices, more than 4,096"),
    "gpu": ({"gpus": [{"name": "a"}]}, "{'name': 'a'} is not a GPU such as {"),
    "names": ({"switches": ["a"]}, "two vertices have the name 'a'"),
    "places": ({"gpus": [GPU, GPU | {"name": "b"}]}, "two GPUs are local rank 0 of host 0"),
    "link": ({"links": [["a", "b"]]}, "['a', 'b'] is not a link such as [from, to, bandwidth]"),
    "end": ({"links": [["a", "c", 1]]}, "the link from a to c uses 'c', which is not a GPU or switch"),
    "loop": ({"links": [["a", "a", 1]]}, "the link from a to a has the same vertex at both ends"),
    "width": (
        {"links": [["a", "b", 0.5]]},
        "the link from a to b has bandwidth 0.5; give a whole number from 1 to 10",
    ),
    "huge": ({"links": [["a", "b", 10**400]]}, "the link from a to b has bandwidth 1000"),
    "twice": ({"links": LINKS * 2}, "two links lead from a to b; replace them by one link"),
    "unbalanced": (
        {"links": [["a", "b", 2], ["b", "a", 1]]},
        "a receives 1 GB/s and sends 2; give equal bandwidths",
    ),
    "one": ({"gpus": [GPU], "links": []}, "it has fewer than two GPUs"),
    "apart": ({"links": []}, "there is no route from a to b; add links"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_network_is_refused_in_one_sentence(case):
    change, sentence = REFUSED[case]
    good = {"format": 1, "gpus": GPUS, "links": LINKS}
    assert from_json(good).ranks == 2
    with pytest.raises(ValueError) as refused:
        from_json(change if isinstance(change, list) else good | change)
    message = str(refused.value)
    assert message.startswith(f"This is not a network: {sentence}")
    assert message.endswith(".") and "\n" not in message


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
def test_names_of_none_are_refused(name, sentence):
    with pytest.raises(ValueError) as refused:
        find(name)
    assert str(refused.value).startswith(sentence)
