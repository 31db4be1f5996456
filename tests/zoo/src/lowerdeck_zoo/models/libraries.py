"""Models of torchvision and timm by name, with random weights."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import nn

from lowerdeck_zoo.program import Inputs, Program, drawn, normal

_TORCHVISION = (
    *("alexnet", "convnext_tiny", "deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50"),
    *("densenet121", "efficientnet_b0", "efficientnet_v2_s", "fcn_resnet50", "googlenet"),
    *("inception_v3", "lraspp_mobilenet_v3_large", "maxvit_t", "mc3_18", "mnasnet0_5"),
    *("mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "mvit_v1_b", "mvit_v2_s"),
    *("r2plus1d_18", "r3d_18", "raft_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18"),
    *("resnet50", "resnext50_32x4d", "s3d", "shufflenet_v2_x1_0", "squeezenet1_0"),
    *("squeezenet1_1", "swin3d_t", "swin_t", "swin_v2_t", "vgg11", "vgg11_bn", "vit_b_16"),
    *("wide_resnet50_2",),
)
_TIMM = (
    *("test_byobnet", "test_coatnet", "test_convnext", "test_convnext2", "test_convnext3"),
    *("test_efficientnet", "test_efficientnet_evos", "test_efficientnet_gn", "test_mambaout"),
    *("test_efficientnet_ln", "test_maxvit", "test_nfnet", "test_resnet", "test_vit"),
    *("test_vit2", "test_vit3", "test_vit4", "test_vit_relpos", "bat_resnext26ts"),
    *("beit_base_patch16_224", "botnet26t_256", "cait_xxs24_224", "coat_lite_tiny"),
    *("convit_tiny", "convmixer_768_32", "convnextv2_atto", "crossvit_9_240", "cspresnet50"),
    *("davit_tiny", "deit3_small_patch16_224", "dla34", "dpn48b", "eca_vovnet39b"),
    *("edgenext_xx_small", "efficientformer_l1", "efficientformerv2_s0", "efficientvit_b0"),
    *("efficientvit_m0", "eva02_tiny_patch14_224", "fasternet_t0", "fastvit_t8", "fbnetv3_b"),
    *("focalnet_tiny_srf", "gcvit_xxtiny", "ghostnet_100", "gmixer_12_224", "hardcorenas_a"),
    *("hgnet_tiny", "hiera_tiny_224", "hrnet_w18_small", "inception_next_atto", "levit_128s"),
    *("mixer_s32_224", "mobilenetv4_conv_small", "mobilevit_xxs", "mobilevitv2_050"),
    *("mvitv2_tiny", "nest_tiny", "pit_ti_224", "poolformer_s12", "pvt_v2_b0", "regnetx_002"),
    *("repghostnet_050", "repvit_m0_9", "res2net50_14w_8s", "resnest14d", "resnetv2_50"),
    *("rexnet_100", "selecsls42", "sequencer2d_s", "shvit_s1", "skresnet18", "starnet_s1"),
    *("swiftformer_xs", "swinv2_cr_tiny_224", "tiny_vit_5m_224", "tnt_s_patch16_224"),
    *("tresnet_m", "twins_svt_small", "visformer_tiny", "vit_tiny_patch16_224", "volo_d1_224"),
    *("xception41", "xcit_nano_12_p16_224", "caformer_s18", "nf_resnet50", "legacy_xception"),
)
_VIDEO = frozenset({"mc3_18", "r2plus1d_18", "r3d_18", "swin3d_t"})


def is_installed(name: str) -> bool:
    """Return whether a package can be imported.

    Args:
        name: Its import name.
    """
    return importlib.util.find_spec(name) is not None


_declared: list[torch.library.Library] = []


def import_torchvision() -> None:
    """Import it where its compiled part is for another build of torch, too: nothing calls that.

    timm and transformers import it themselves.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
        importlib.import_module("torchvision")


def _timm(name: str) -> nn.Module:
    import_torchvision()
    return importlib.import_module("timm").create_model(name, pretrained=False)


def _images(name: str) -> Inputs:
    def inputs() -> list[tuple[Any, ...]]:
        sizes = importlib.import_module("timm").get_pretrained_cfg(name).input_size
        return [(torch.randn(1, *sizes),) for _ in range(3)]

    return inputs


def _torchvision(name: str) -> nn.Module:
    import_torchvision()
    models = importlib.import_module("torchvision.models")
    options: dict[str, Any] = {"weights": None}
    if "resnet50" in name and "_resnet50" in name and name.startswith(("deeplab", "fcn")):
        options["weights_backbone"] = None
    if name.endswith("mobilenet_v3_large") and name.startswith(("deeplab", "lraspp")):
        options["weights_backbone"] = None
    if name in {"googlenet", "inception_v3"}:
        options |= {"init_weights": False, "aux_logits": False}
    return models.get_model(name, **options)


def _inputs(name: str) -> Inputs:
    if name == "raft_small":
        return drawn(lambda: tuple(torch.randn(1, 3, 128, 128) for _ in range(2)))
    if name in _VIDEO:
        return normal(1, 3, 16, 112, 112)
    if name.startswith("mvit") or name == "s3d":
        return normal(1, 3, 16, 224, 224)
    size = 299 if name == "inception_v3" else 224
    return normal(1, 3, size, size)


def _program(library: str, name: str, build: Any, inputs: Inputs) -> Program:
    tags = f"large {library} {'video' if name in _VIDEO else 'vision'}"
    return Program(f"{library}_{name}", lambda: build(name), inputs, tags=tags)


PROGRAMS = (
    *(_program("timm", name, _timm, _images(name)) for name in _TIMM if is_installed("timm")),
    *(
        _program("torchvision", name, _torchvision, _inputs(name))
        for name in _TORCHVISION
        if is_installed("torchvision")
    ),
)
