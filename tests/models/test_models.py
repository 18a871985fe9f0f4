from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

from fednet import models, registry
from fednet.errors import ConfigError

C32 = (3, 32, 32)
C64 = (3, 64, 64)
G28 = (1, 28, 28)

# name, options, input, classes, parameters, elements of buffers: as the five papers' models have
# them
SIZES = [
    ("pdc_cnn", {}, C32, 10, 92_626, 0),
    ("pdc_cnn", {}, C32, 100, 115_756, 0),
    ("pdc_cnn", {}, C64, 200, 417_936, 0),
    ("lenet5", {}, C32, 10, 62_006, 0),
    ("lenet5", {}, C32, 100, 69_656, 0),
    ("lenet5", {}, G28, 10, 44_426, 0),
    ("resnet18_bn_proj", {}, C32, 10, 11_565_386, 9_620),
    ("resnet18_bn_proj", {"stem": "cifar"}, C64, 200, 11_614_216, 9_620),
    ("resnet18_bn_proj", {"stem": "imagenet"}, C64, 200, 11_621_896, 9_620),
    ("resnet50_bn_proj", {}, C32, 10, 28_223_818, 53_173),
    ("resnet50_bn_proj", {}, C32, 100, 28_246_948, 53_173),
    ("resnet18_gn", {}, C32, 10, 11_173_962, 0),
    ("resnet18_gn", {}, C32, 100, 11_220_132, 0),
    ("resnet18_gn", {"stem": "imagenet", "gn_groups": 32}, C32, 100, 11_227_812, 0),
    ("resnet18_gn", {}, C64, 200, 11_271_432, 0),
    ("resnet18_gn", {"stem": "imagenet"}, C64, 200, 11_279_112, 0),
    ("abc_mlp", {}, G28, 10, 258_310, 0),
    ("abc_conv", {}, C32, 10, 307_842, 0),
    ("convnet3", {}, C32, 10, 320_010, 0),
    ("convnet3", {}, C32, 100, 504_420, 0),
    ("convnet3", {}, G28, 10, 317_706, 0),
    ("vgg11", {}, C32, 10, 9_231_114, 0),
    ("vgg11", {"width": 8}, C32, 10, 145_898, 0),
    ("convnet3", {"width": 16}, C32, 10, 7_754, 0),
    ("vgg11", {"norm": "batch"}, C32, 10, 9_231_114, 5_512),
    ("vgg11", {"norm": "none"}, C32, 10, 9_225_610, 0),
    ("pfl_cnn", {}, C32, 10, 1_626_442, 0),
    ("rds_mnist", {}, G28, 10, 1_663_370, 0),
    ("rds_fmnist", {}, G28, 10, 28_938, 0),
    ("rds_cifar", {}, C32, 10, 797_962, 0),
    ("mlp", {"hidden": [3]}, (4,), 2, (4 * 3 + 3) + (3 * 2 + 2), 0),
    ("mlp", {"hidden": []}, (2, 5), 3, 10 * 3 + 3, 0),
    # embedding, three gates with two biases each, head
    ("gru", {"hidden": 5}, (7,), 11, 11 * 8 + 3 * 5 * (8 + 5 + 2) + 5 * 11 + 11, 0),
    # embedding, positions; two norms, q k v o, up and down; the last norm, head
    (
        "transformer",
        {"width": 4, "heads": 2, "blocks": 1},
        (7,),
        11,
        (11 + 7) * 4 + 2 * 8 + 4 * (16 + 4) + (4 * 16 + 16) + (16 * 4 + 4) + 8 + 4 * 11 + 11,
        0,
    ),
]
SMALL = {"resnet50_bn_proj": (3, 8, 8), "resnet18_bn_proj": (3, 8, 8), "resnet18_gn": (3, 8, 8)}
SHAPES = {"abc_mlp": G28, "rds_mnist": G28, "rds_fmnist": G28, "mlp": (7,), **SMALL}
NAMES = registry.model.names()
OF_SAMPLES = [n for n in NAMES if n not in ("gru", "transformer")]  # of one vector or image


def make(
    name: str, seed: int = 0, shape: tuple[int, ...] | None = None, classes: int = 10, **options
) -> nn.Module:
    return models.build({"name": name, **options}, shape or SHAPES.get(name, C32), classes, seed)


@pytest.mark.parametrize(("name", "options", "shape", "classes", "parameters", "buffers"), SIZES)
def test_a_model_has_the_size_of_its_paper(name, options, shape, classes, parameters, buffers):
    with torch.device("meta"):
        module = models.make({"name": name, **options}, shape, classes)
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert sum(b.numel() for b in module.buffers()) == buffers


def test_every_model_of_the_package_is_in_the_table():
    assert {e.name for e in registry.model.entries() if e.module.startswith("fednet.")} == {
        row[0] for row in SIZES
    }


@pytest.mark.parametrize("name", [n for n in OF_SAMPLES if n != "resnet50_bn_proj"])
def test_gradients_reach_every_parameter_and_the_head_turns_features_into_outputs(name):
    module = make(name)
    x = torch.randn(2, *SHAPES.get(name, C32), generator=torch.Generator().manual_seed(1))
    cross_entropy(module(x), torch.tensor([0, 3])).backward()
    for parameter_name, p in module.named_parameters():
        assert p.grad is not None, parameter_name
        assert bool(torch.isfinite(p.grad).all()), parameter_name
    module.eval()
    last = [m for m in module.modules() if isinstance(m, nn.Linear)][-1]
    assert module.head is last
    assert models.head_names(module) == ("head.weight", "head.bias")
    with torch.no_grad():
        features = module.features(x)
        assert features.shape == (2, last.in_features)
        assert torch.equal(module.head(features), module(x))
        if hasattr(module, "projector"):
            assert torch.equal(module.projector(module.body(x)), features)


@pytest.mark.parametrize(
    ("name", "options", "width"),
    [("gru", {"hidden": 5}, 5), ("transformer", {"width": 8, "heads": 2, "blocks": 2}, 8)],
)
def test_a_network_over_tokens_gives_logits_as_torch_orders_them_and_sees_no_later_token(
    name, options, width
):
    module = make(name, shape=(7,), classes=11, **options)
    x = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(0))
    other = torch.cat([x[:, :4], (x[:, 4:] + 1) % 11], 1)
    one = module(x)
    two = module(other)
    assert one.shape == (3, 11, 7)
    assert module.features(x).shape == (3, 7, width)
    assert torch.allclose(module.head(module.features(x)).transpose(1, 2), one)
    assert torch.allclose(one[:, :, :4], two[:, :, :4], atol=1e-6)
    assert not torch.allclose(one[:, :, 4:], two[:, :, 4:], atol=1e-3)


def test_the_same_seed_gives_the_same_weights_and_leaves_torchs_generator_alone():
    before = torch.random.get_rng_state()
    a, b, other = (make("lenet5", seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), before)
    for key, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[key])
    assert not torch.equal(a.head.weight, other.head.weight)


@pytest.mark.parametrize(
    ("section", "shape", "words"),
    [
        ({"name": "lenet"}, C32, ["unknown model 'lenet'", "Did you mean 'lenet5'"]),
        ({}, C32, ["model.name is missing", "lenet5"]),
        ({"name": "vgg11", "nrom": "batch"}, C32, ["nrom", "vgg11", "Did you mean model.norm"]),
        ({"name": "resnet18_gn", "gn_groups": 3}, C32, ["gn_groups", "3", "64"]),
        ({"name": "lenet5"}, (1, 12, 12), ["lenet5", "16x16", "1x12x12"]),
        ({"name": "vgg11"}, (3, 30, 30), ["vgg11", "32x32", "3x30x30"]),
        ({"name": "convnet3"}, (30,), ["convnet3", "(30,)", "mlp"]),
        ({"name": "mlp"}, (), ["mlp", "()"]),
    ],
)
def test_what_cannot_be_built_says_why(section, shape, words):
    with pytest.raises(ConfigError) as caught:
        models.build(section, shape, 10, 0)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("lenet5", 16),
        ("abc_conv", 16),
        ("rds_cifar", 16),
        ("rds_mnist", 4),
        ("rds_fmnist", 4),
        ("convnet3", 8),
        ("vgg11", 32),
        ("vgg11", 28),
    ],
)
def test_the_smallest_image_that_is_accepted_works(name, side):
    assert make(name, shape=(1, side, side), classes=2)(torch.zeros(2, 1, side, side)).shape == (
        2,
        2,
    )


# -- parts of one's own ----------------------------------------------------------------------------
def test_a_class_of_ones_own_takes_its_keyword_arguments_as_options():
    @registry.model("mine")
    class Mine(nn.Module):
        def __init__(self, *, input_shape: tuple[int, ...], classes: int, width: int = 4):
            super().__init__()
            self.a = nn.Linear(input_shape[0], width)
            self.out = nn.Linear(width, classes)

    module = make("mine", shape=(5,), classes=2, width=6)
    assert module.a.out_features == 6
    assert models.head_names(module) == ("out.weight", "out.bias")
    with pytest.raises(ConfigError, match=r"model\.widht.*Did you mean model\.width"):
        make("mine", shape=(5,), classes=2, widht=6)


# -- weights from a file ---------------------------------------------------------------------------
def test_weights_of_a_file_replace_the_initialisation(tmp_path):
    source = make("lenet5", seed=1)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    module = make("lenet5", seed=2, weights=str(tmp_path / "w.safetensors"))
    for key, value in module.state_dict().items():
        assert torch.equal(value, source.state_dict()[key])


def test_a_file_may_leave_out_the_head_which_keeps_its_initialisation(tmp_path):
    source = make("lenet5", seed=1, classes=100)
    body = {k: v.half() for k, v in source.state_dict().items() if not k.startswith("head.")}
    save_file(body, tmp_path / "w.safetensors")
    module = make("lenet5", seed=2, weights=str(tmp_path / "w.safetensors"))
    assert torch.equal(module.head.weight, make("lenet5", seed=2).head.weight)
    assert torch.equal(module.body.conv1.weight, source.body.conv1.weight.half().float())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: {**s, "body.conv9.weight": s["body.conv1.weight"]},
            "'body.conv9.weight'.*Did you mean 'body.conv",
        ),
        (lambda s: {k: v for k, v in s.items() if k != "body.fc1.bias"}, "lacks 1 .*body.fc1.bias"),
        (lambda s: {**s, "head.bias": torch.zeros(3)}, r"'head.bias'.*\(3,\).*\(10,\)"),
        (lambda s: {**s, "head.bias": torch.full((10,), float("nan"))}, "'head.bias'.*finite"),
        (lambda s: {**s, "head.bias": torch.zeros(10, dtype=torch.int64)}, "'head.bias'.*int64"),
    ],
)
def test_a_file_that_does_not_fit_the_model_says_where(tmp_path, change, words):
    save_file(
        {k: v.clone() for k, v in change(dict(make("lenet5").state_dict())).items()},
        tmp_path / "w.safetensors",
    )
    with pytest.raises(ConfigError, match=words):
        make("lenet5", weights=str(tmp_path / "w.safetensors"))


def test_a_file_that_is_no_safetensors_is_refused(tmp_path):
    torn = tmp_path / "w.safetensors"
    torn.write_bytes(b"\x80\x04 no")
    with pytest.raises(ConfigError, match="the only format"):
        make("lenet5", weights=str(torn))
    with pytest.raises(ConfigError, match="no file"):
        make("lenet5", weights=str(tmp_path / "absent.safetensors"))


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"name": "vgg11", "width": 10**8}, "vgg11: it is larger than any memory"),
        ({"name": "gru", "layers": 10**8}, "expected a whole number >= 1 and <= 1000"),
    ],
)
def test_a_size_that_nothing_could_hold_is_refused_before_it_is_built(section, says):
    shape = (3, 32, 32) if section["name"] == "vgg11" else (8,)
    with pytest.raises(ConfigError, match=says):
        models.build(section, shape, 10, 0)
