"""torchvision: one model of each kind, as get_model builds it without weights."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torchvision

from .arguments import checked
from .examine import Make, Prepare

NAMES = (
    "densenet121 deeplabv3_mobilenet_v3_large efficientnet_b0 efficientnet_v2_s "
    "fasterrcnn_mobilenet_v3_large_fpn googlenet "
    "lraspp_mobilenet_v3_large mc3_18 mnasnet0_5 mnasnet1_0 "
    "mobilenet_v2 mobilenet_v3_large mobilenet_v3_small quantized_mobilenet_v2 "
    "quantized_shufflenet_v2_x0_5 raft_small raft_large regnet_x_400mf regnet_y_400mf resnet18 resnet50 "
    "resnext50_32x4d s3d shufflenet_v2_x0_5 squeezenet1_0 squeezenet1_1 "
    "ssdlite320_mobilenet_v3_large"
).split()
# Those whose ordinary size is beyond the limit, by the arguments of their constructors.
SMALL = {
    "vit": lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10),
    "swin": lambda: torchvision.models.SwinTransformer([4, 4], 24, [1, 1], [2, 4], [7, 7], num_classes=10),
    "swin3d": lambda: torchvision.models.video.SwinTransformer3d(
        [2, 4, 4], 24, [1, 1], [2, 4], [8, 7, 7], num_classes=10
    ),
    "convnext": lambda: torchvision.models.ConvNeXt(
        [torchvision.models.convnext.CNBlockConfig(16, 32, 2), torchvision.models.convnext.CNBlockConfig(32, None, 2)],
        num_classes=10,
    ),
    "retinanet": lambda: torchvision.models.detection.RetinaNet(
        torchvision.models.detection.backbone_utils.resnet_fpn_backbone(backbone_name="resnet18", weights=None), 3
    ),
    "mvit": lambda: torchvision.models.video.MViT(
        (32, 32),
        4,
        [
            torchvision.models.video.mvit.MSBlockConfig(2, 16, 32, [3, 3, 3], [], [1, 4, 4], [1, 1, 1]),
            torchvision.models.video.mvit.MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
        ],
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=False,
        num_classes=10,
    ),
    "maxvit": lambda: torchvision.models.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.1, num_classes=10),
}


MAX_ELEMENTS = 26_000_000


def _prepare(name: str) -> Make:
    if name in SMALL:
        return checked(SMALL[name], MAX_ELEMENTS)
    options: dict[str, Any] = {"weights": None}
    builder = torchvision.models.get_model_builder(name)
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None
    if name == "googlenet":
        options["init_weights"] = True  # without it, it warns that this will be the default
    return checked(lambda: builder(**options), MAX_ELEMENTS)


def models() -> list[tuple[str, Prepare]]:
    return [(name, functools.partial(_prepare, name)) for name in [*SMALL, *NAMES]]
