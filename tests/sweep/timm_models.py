"""timm: the smallest model of each of its files."""

from __future__ import annotations

import functools

import timm

from .arguments import checked
from .examine import Make, Prepare

MAX_ELEMENTS = 12_000_000
NAMES = (
    "cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 cpubone_nano crossvit_tiny_240 cs3darknet_focus_s "
    "csatv2 cspnext_tiny deit_tiny_patch16_224 densenet121 dla46x_c dpn48b edgenext_xx_small efficientformer_l1 "
    "efficientformerv2_s0 efficientvim_m1 efficientvit_b0 efficientvit_m0 ese_vovnet19b_slim_dw fasternet_t0 "
    "fastvit_t8 gcvit_xxtiny ghostnet_050 gmlp_ti16_224 halonet_h1 hardcorenas_b hgnetv2_b0 hrnet_w18_small "
    "iformer_t inception_next_atto inception_v3 lcnet_035 lcnetv2_small legacy_seresnet18 legacy_xception "
    "levit_128s lowformer_b0 mobilevit_xxs mvitv2_tiny nest_tiny pit_ti_224 poolformerv2_s12 pvt_v2_b0 rdnet_tiny "
    "regnetx_002 repghostnet_050 repvit_m1 res2next50 resnest14d resnetv2_18 rexnet_100 shvit_s1 skresnet18 "
    "starnet_s050 swiftformer_xs test_byobnet test_coatnet test_convnext test_efficientnet test_mambaout "
    "test_nfnet test_resnet test_vit test_vit_relpos tiny_vit_5m_224 tnt_s_legacy_patch16_224 twins_svt_small "
    "visformer_tiny vit_tiny_patch16_dinov3_qkvb vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xception41p "
    "xcit_nano_12_p8_224 "
).split()


def _prepare(name: str) -> Make:
    return checked(lambda: timm.create_model(name, num_classes=10), MAX_ELEMENTS)


def models() -> list[tuple[str, Prepare]]:
    return [(name, functools.partial(_prepare, name)) for name in NAMES]
