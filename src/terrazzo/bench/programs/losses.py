"""Losses of detection, segmentation, metric and self-supervised learning; and dynamic programs over alignments."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as f

from terrazzo.bench.programs.registry import Learned, Made, normal, program, uniform, whole


def focal(logits: Tensor, deltas: Tensor, target: Tensor, boxes: Tensor) -> Tensor:
    """Sigmoid focal loss of all anchors, and smooth L1 of the boxes of those that have an object; -1 is ignored."""
    hot = f.one_hot(target.clamp(min=0), logits.shape[-1]).to(logits.dtype) * (target > 0)[..., None].to(logits.dtype)
    x = logits.float()
    p = torch.sigmoid(x)
    ce = f.binary_cross_entropy_with_logits(x, hot.float(), reduction="none")
    pt = p * hot + (1 - p) * (1 - hot)
    weight = (0.25 * hot + 0.75 * (1 - hot)) * (1 - pt).square()
    counted = (target >= 0)[..., None]
    positive = (target > 0).sum().clamp(min=1)
    near = f.smooth_l1_loss(deltas.float(), boxes.float(), beta=0.1, reduction="none") * (target > 0)[..., None]
    return ((weight * ce * counted).sum() + near.sum()) / positive


@program(small={"images": 2, "anchors": 30, "classes": 5}, training=True)
def focal_detection(images: int = 8, anchors: int = 49104, classes: int = 90) -> Made:
    """Focal loss over EfficientDet's anchors."""
    return (
        Learned(focal, normal(images, anchors, classes), normal(images, anchors, 4)),
        whole(classes + 1, images, anchors) - 1,
        normal(images, anchors, 4),
    )


def generalized_iou(boxes: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
    """Complete IoU of boxes as centre and size."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = (t.float().unbind(-1) for t in (boxes, wanted))
    aw, ah = aw.exp(), ah.exp()
    left, right = torch.maximum(ax - aw / 2, bx - bw / 2), torch.minimum(ax + aw / 2, bx + bw / 2)
    top, low = torch.maximum(ay - ah / 2, by - bh / 2), torch.minimum(ay + ah / 2, by + bh / 2)
    inter = (right - left).clamp(min=0) * (low - top).clamp(min=0)
    iou = inter / (aw * ah + bw * bh - inter + 1e-7)
    wide = torch.maximum(ax + aw / 2, bx + bw / 2) - torch.minimum(ax - aw / 2, bx - bw / 2)
    high = torch.maximum(ay + ah / 2, by + bh / 2) - torch.minimum(ay - ah / 2, by - bh / 2)
    far = ((ax - bx).square() + (ay - by).square()) / (wide.square() + high.square() + 1e-7)
    v = 0.40528473 * (torch.atan(bw / bh) - torch.atan(aw / ah)).square()
    alpha = (v / (v - iou + 1 + 1e-7)).detach()
    return ((1 - iou + far + alpha * v) * weight.float()).sum() / weight.float().sum()


@program(small={"images": 2, "boxes": 20}, training=True)
def complete_iou(images: int = 16, boxes: int = 8400) -> Made:
    """The IoU loss of YOLO's boxes."""
    return (
        Learned(generalized_iou, normal(images, boxes, 4)),
        0.5 + uniform(images, boxes, 4),
        uniform(images, boxes),
    )


def lovasz(logits: Tensor, target: Tensor) -> Tensor:
    """Lovasz softmax: errors of each class sorted, weighted by the gradient of the Jaccard index."""
    p = torch.softmax(logits.float(), 1).flatten(2).transpose(0, 1).flatten(1)
    wanted = (target.flatten()[None] == torch.arange(p.shape[0], device=p.device)[:, None]).float()
    errors, at = (wanted - p).abs().sort(1, descending=True)
    sorted_ = wanted.gather(1, at)
    union = sorted_.sum(1, keepdim=True) + (1 - sorted_).cumsum(1)
    jaccard = 1 - (sorted_.sum(1, keepdim=True) - sorted_.cumsum(1)) / union
    return (errors * torch.diff(jaccard, dim=1, prepend=jaccard[:, :1] * 0)).sum(1).mean()


@program(small={"images": 1, "classes": 3, "size": 8}, training=True)
def lovasz_softmax(images: int = 2, classes: int = 19, size: int = 256) -> Made:
    """Segmentation by Lovasz' extension."""
    return Learned(lovasz, normal(images, classes, size, size)), whole(classes, images, size, size)


def dice(logits: Tensor, target: Tensor) -> Tensor:
    """Generalised dice, cross-entropy, and the boundary weighted by a pooled label."""
    p = torch.softmax(logits.float(), 1)
    hot = f.one_hot(target, logits.shape[1]).permute(0, 4, 1, 2, 3).float()
    inter, both = (p * hot).sum((0, 2, 3, 4)), (p + hot).sum((0, 2, 3, 4))
    weight = 1 / hot.sum((0, 2, 3, 4)).square().clamp(min=1)
    edge = (f.max_pool3d(hot, 3, 1, 1) + f.max_pool3d(-hot, 3, 1, 1)).amax(1)
    ce = f.cross_entropy(logits.float(), target, reduction="none")
    return 1 - 2 * (weight * inter).sum() / (weight * both).sum() + (ce * (1 + 4 * edge)).mean()


@program(small={"images": 1, "classes": 3, "size": 6}, training=True)
def dice_volumes(images: int = 2, classes: int = 4, size: int = 96) -> Made:
    """Segmented volumes: dice, cross-entropy and edges."""
    return Learned(dice, normal(images, classes, size, size, size)), whole(classes, images, size, size, size)


def hardest(x: Tensor, label: Tensor) -> Tensor:
    """The batch-hard triplet loss."""
    x = f.normalize(x, dim=-1)
    d = (2 - 2 * (x @ x.T).float()).clamp(min=1e-12).sqrt()
    same = label[:, None] == label
    far = torch.where(same, d, -1.0).amax(1)
    near = torch.where(same, 1e9, d).amin(1)
    return f.relu(far - near + 0.3).mean()


@program(small={"count": 12, "width": 8}, training=True)
def hardest_triplets(count: int = 2048, width: int = 512) -> Made:
    """Triplets mined from a batch."""
    return Learned(hardest, normal(count, width)), whole(64, count)


def supervised(x: Tensor, label: Tensor) -> Tensor:
    """Supervised contrastive: all of the same class attract."""
    x = f.normalize(x, dim=-1)
    s = (x @ x.T).float() / 0.07
    eye = torch.eye(len(x), dtype=torch.bool, device=x.device)
    same = ((label[:, None] == label) & ~eye).float()
    log = s - torch.logsumexp(s.masked_fill(eye, float("-inf")), 1, keepdim=True)
    return -((same * log).sum(1) / same.sum(1).clamp(min=1)).mean()


@program(small={"count": 12, "width": 8}, training=True)
def supervised_contrast(count: int = 4096, width: int = 128) -> Made:
    """Contrast by classes."""
    return Learned(supervised, normal(count, width)), whole(100, count)


def vicreg(a: Tensor, b: Tensor) -> Tensor:
    """Invariance, variance and covariance; and Barlow's cross-correlation."""
    near = f.mse_loss(a.float(), b.float())
    a, b = a - a.mean(0), b - b.mean(0)
    n, d = a.shape
    spread = sum(f.relu(1 - (t.float().var(0) + 1e-4).sqrt()).mean() for t in (a, b))
    off = ~torch.eye(d, dtype=torch.bool, device=a.device)
    mixed = sum(((t.T @ t).float() / (n - 1)).square().mul(off).sum() / d for t in (a, b))
    c = (f.normalize(a, dim=0).T @ f.normalize(b, dim=0)).float()
    barlow = (c.diagonal() - 1).square().sum() + 0.005 * (c.square() * off).sum()
    return 25 * near + 25 * spread + mixed + barlow


@program(small={"count": 6, "width": 8}, training=True)
def variance_covariance(count: int = 1024, width: int = 4096) -> Made:
    """VICReg and Barlow twins on two views."""
    return (Learned(vicreg, normal(count, width), normal(count, width)),)


def dino(student: Tensor, teacher: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy between sharpened teachers and all other views, and the centre that moves on."""
    views = student.shape[0]
    q = torch.softmax((teacher.float() - centre.float()) / 0.04, -1)
    log = torch.log_softmax(student.float() / 0.1, -1)
    pairs = -torch.einsum("tbk,sbk->ts", q, log) / student.shape[1]
    other = ~torch.eye(2, views, dtype=torch.bool, device=student.device)
    return (pairs * other).sum() / other.sum(), 0.9 * centre + 0.1 * teacher.mean((0, 1))


@program(small={"views": 3, "count": 4, "out": 12}, training=True)
def dino_head(views: int = 10, count: int = 32, out: int = 65536) -> Made:
    """Self-distillation over 65536 prototypes."""
    return Learned(dino, normal(views, count, out)), normal(2, count, out), normal(out)


def transducer(logits: Tensor, target: Tensor) -> Tensor:
    """RNN-T's loss: the sum over alignments, one diagonal after the other."""
    log = torch.log_softmax(logits.float(), -1)
    b, t = log.shape[:2]
    blank = log[..., 0]
    emit = log[:, :, :-1].gather(-1, target[:, None, :, None].expand(-1, t, -1, 1))[..., 0]
    rows = [blank.new_zeros(b)]
    alpha = torch.cat((rows[0][:, None], emit[:, 0].cumsum(-1)), 1)
    for k in range(1, t):
        stay = alpha + blank[:, k - 1]
        summed = f.pad(emit[:, k].cumsum(-1), (1, 0))
        alpha = summed + torch.logcumsumexp(stay - summed, -1)
    return -(alpha[:, -1] + blank[:, -1, -1]).mean()


@program(small={"count": 2, "frames": 5, "labels": 3, "words": 7}, training=True)
def transducer_loss(count: int = 4, frames: int = 100, labels: int = 30, words: int = 512) -> Made:
    """Alignments of sound and text, summed."""
    return Learned(transducer, normal(count, frames, labels + 1, words)), 1 + whole(words - 1, count, labels)


def soft_time_warp(x: Tensor, y: Tensor) -> Tensor:
    """Soft dynamic time warping, by diagonals that lie in rows of their own."""
    d = torch.cdist(x.float(), y.float()).square()
    b, n, m = d.shape
    i = torch.arange(n, device=d.device)
    before = torch.full((b, n + 1), 1e8, device=d.device)
    last = before.clone()
    last[:, 0] = 0
    for k in range(n + m - 1):
        at = k - i
        cost = torch.where((at >= 0) & (at < m), d[:, i, at.clamp(0, m - 1)], 1e8)
        three = torch.stack((last[:, 1:], before[:, 1:], before[:, :-1]), -1)
        if k == 0:
            three = torch.stack((last[:, :-1], before[:, 1:], before[:, :-1]), -1)
        new = f.pad(cost - 0.1 * torch.logsumexp(-three / 0.1, -1), (1, 0), value=1e8)
        last, before = before, new
    return before[:, -1].mean()


@program(small={"count": 2, "length": 5, "width": 3}, training=True, dtypes=("f32",))
def time_warping(count: int = 32, length: int = 48, width: int = 16) -> Made:
    """Soft-DTW between batches of series."""
    return Learned(soft_time_warp, normal(count, length, width)), normal(count, length, width)


def perceptual(images: Tensor, wanted: Tensor, filters: Tensor) -> Tensor:
    """Charbonnier, edges, Fourier magnitude, and Gram matrices of random filters."""
    near = ((images - wanted).float().square() + 1e-6).sqrt().mean()
    edge = sum((images.diff(dim=k) - wanted.diff(dim=k)).abs().float().mean() for k in (-1, -2))
    a, b = (torch.fft.rfft2(t.float(), norm="ortho") for t in (images, wanted))
    grams = []
    for t in (images, wanted):
        y = f.relu(f.conv2d(t, filters, stride=2)).flatten(2)
        grams.append((y @ y.transpose(1, 2)).float() / y.shape[-1])
    return near + edge + 0.1 * (a - b).abs().mean() + (grams[0] - grams[1]).square().mean()


@program(small={"images": 1, "size": 12}, training=True)
def restoration_losses(images: int = 8, size: int = 256) -> Made:
    """What restored images are compared by."""
    return Learned(perceptual, normal(images, 3, size, size)), normal(images, 3, size, size), normal(64, 3, 5, 5)


def distilled(student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """Hard labels smoothed, KL at a temperature, and the Jensen-Shannon divergence."""
    t = 4.0
    hard = f.cross_entropy(student.float(), target, label_smoothing=0.1, ignore_index=0)
    p, q = torch.log_softmax(student.float() / t, -1), torch.log_softmax(teacher.float() / t, -1)
    mean = torch.logsumexp(torch.stack((p, q)), 0) - 0.6931471805599453
    both = f.kl_div(mean, p, reduction="none", log_target=True) + f.kl_div(mean, q, reduction="none", log_target=True)
    return hard + t * t * f.kl_div(p, q, reduction="batchmean", log_target=True) + both.sum(-1).mean()


@program(small={"rows": 6, "words": 20}, training=True)
def distillation(rows: int = 4096, words: int = 32000) -> Made:
    """A student's words beside a teacher's."""
    return Learned(distilled, normal(rows, words)), normal(rows, words), whole(words, rows)


def ranked(scores: Tensor, grades: Tensor) -> Tensor:
    """LambdaRank over all pairs of a list, and ListNet."""
    s, g = scores.float(), grades.float()
    place = s.argsort(-1, descending=True).argsort(-1)
    ideal = g.sort(-1, descending=True).values
    discount = torch.log2(torch.arange(g.shape[-1], device=g.device) + 2.0)
    best = ((2**ideal - 1) / discount).sum(-1).clamp(min=1e-6)
    gain, cut = 2**g - 1, 1 / torch.log2(place + 2.0)
    delta = ((gain[:, :, None] - gain[:, None]) * (cut[:, :, None] - cut[:, None])).abs() / best[:, None, None]
    pairs = (g[:, :, None] > g[:, None]).float() * delta * f.softplus(-(s[:, :, None] - s[:, None]))
    lists = -(torch.softmax(g, -1) * torch.log_softmax(s, -1)).sum(-1)
    return pairs.sum((1, 2)).mean() + lists.mean()


@program(small={"lists": 3, "length": 6}, training=True)
def lambda_rank(lists: int = 256, length: int = 256) -> Made:
    """Lists that are ranked."""
    return Learned(ranked, normal(lists, length)), whole(5, lists, length)
