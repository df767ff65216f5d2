"""timm: the smallest model of each of its files."""

from __future__ import annotations

import functools

import timm

from .arguments import checked
from .examine import Make, NotBuilt, Prepare

NAMES = (
    "beit_base_patch16_224 cait_xxs24_224 coat_tiny convit_tiny cpubone_nano crossvit_tiny_240 "
    "cs3darknet_focus_s csatv2 cspnext_tiny davit_tiny deepseek_vit_412m deit_tiny_patch16_224 densenet121 "
    "dla46x_c dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientvim_m1 efficientvit_b0 "
    "efficientvit_m0 ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8 gcvit_xxtiny "
    "gemma4_vit_167m_enc ghostnet_050 gmlp_ti16_224 halonet_h1 hardcorenas_b hgnetv2_b0 hiera_tiny_224 "
    "hrnet_w18_small iformer_t inception_next_atto lcnet_035 lcnetv2_small "
    "legacy_seresnet18 levit_128s mobilevit_xxs "
    "naflexvit_base_patch16_parfac_gap pit_ti_224 poolformerv2_s12 pvt_v2_b0 "
    "qwen3_vit_88m regnetx_002 repghostnet_050 repvit_m1 res2next50 resnest14d resnetv2_18 rexnet_100 "
    "sam2_hiera_tiny samvit_base_patch16_224 sequencer2d_s shvit_s1 skresnet18 starnet_s050 "
    "swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window8_256 test_byobnet "
    "test_coatnet test_convnext test_efficientnet test_mambaout test_nfnet test_resnet test_vit test_vit_relpos "
    "tiny_vit_5m_224 tresnet_m twins_svt_small visformer_tiny "
    "vit_tiny_patch16_dinov3_qkvb vit_tiny_r_s16_p8_224 "
    "xcit_nano_12_p8_224 "
).split()


# Tried in this order for those above that size: they have no small one.
SMALLER = (
    {"embed_dim": 48, "depth": 2, "num_heads": 3},
    {"embed_dim": 24, "depths": (1, 1, 2, 1), "num_heads": (2, 2, 4, 4)},
    {"embed_dim": 24, "depths": (1, 1, 2, 1)},
    {"embed_dim": 24, "num_heads": 1, "stages": (1, 1, 1, 1)},
    {"embed_dims": (24, 48, 96, 192), "depths": (1, 1, 1, 1)},
    {"embed_dims": (24, 48, 96, 192), "num_heads": (2, 2, 4, 4), "depths": (1, 1, 1, 1)},
    {"embed_dims": (32, 64, 64, 64), "layers": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)},
    {"depths": (1, 1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
)


def _prepare(name: str) -> Make:
    why = ""
    for smaller in ({}, *SMALLER):
        try:
            return checked(functools.partial(timm.create_model, name, num_classes=10, **smaller))
        except NotBuilt as error:
            why = why or str(error)
    raise NotBuilt(why)


def models() -> list[tuple[str, Prepare]]:
    return [(name, functools.partial(_prepare, name)) for name in NAMES]
