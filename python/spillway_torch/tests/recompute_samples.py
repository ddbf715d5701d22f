# SPDX-License-Identifier: Apache-2.0
"""Sample calls of each operation that can be recomputed, as code for the programs of tests. They use the default device."""

OPERATIONS = """
aten = torch.ops.aten
torch.manual_seed(0)
x, y = torch.randn(64, 128), torch.randn(64, 128)
positive = torch.rand(64, 128) + 0.5
mask = torch.rand(64, 128) > 0.5
few = torch.randn(128)
square, other = torch.randn(128, 128), torch.randn(128, 96)
images = torch.randn(4, 16, 12, 12)
channels, more, mean, variance = torch.randn(16), torch.rand(16), torch.zeros(16), torch.ones(16)
fixed_mean, fixed_variance = torch.randn(16), torch.rand(16)
words = torch.randint(0, 64, (48, 40))
batch, weights, zeros = torch.randn(4, 48, 64), torch.randn(4, 64, 56), torch.zeros(4, 48, 56)
large = torch.randn(8, 16, 12, 12)
samples = {
    "add.Tensor": lambda: [torch.add(x, y, alpha=3), x + 2, x + few, x.t() + y.t()],
    "sub.Tensor": lambda: [x - y],
    "mul.Tensor": lambda: [x * y, x * 0.3, x * mask],
    "div.Tensor": lambda: [x / positive, x / 3],
    "neg": lambda: [-x], "abs": lambda: [abs(x)], "reciprocal": lambda: [positive.reciprocal()],
    "sqrt": lambda: [positive.sqrt()], "rsqrt": lambda: [positive.rsqrt()],
    "pow.Tensor_Scalar": lambda: [x ** 3, positive ** 0.5],
    "exp": lambda: [x.exp(), x[:, :100].exp()], "log": lambda: [positive.log()], "erf": lambda: [x.erf()],
    "sin": lambda: [x.sin()], "cos": lambda: [x.cos()],
    "maximum": lambda: [torch.maximum(x, y)], "minimum": lambda: [torch.minimum(x, y)],
    "clamp": lambda: [x.clamp(-0.5, 0.5)], "clamp_min": lambda: [x.clamp_min(0.1)],
    "where.self": lambda: [torch.where(mask, x, y)],
    "masked_fill.Scalar": lambda: [x.masked_fill(mask, -1e4)],
    "masked_fill.Tensor": lambda: [x.masked_fill(mask, few[3])],
    "relu": lambda: [x.relu()], "leaky_relu": lambda: [F.leaky_relu(x)], "elu": lambda: [F.elu(x)],
    "gelu": lambda: [F.gelu(x), F.gelu(x, approximate="tanh")], "silu": lambda: [F.silu(x)],
    "mish": lambda: [F.mish(x)], "tanh": lambda: [x.tanh()], "sigmoid": lambda: [x.sigmoid()],
    "softplus": lambda: [F.softplus(x)], "hardtanh": lambda: [F.hardtanh(x)],
    "hardswish": lambda: [F.hardswish(x)], "hardsigmoid": lambda: [F.hardsigmoid(x)],
    "cat": lambda: [torch.cat([x, y, x], 1), torch.cat([x[:, ::2], y[:, 1::2]])],
    "embedding": lambda: [F.embedding(words, square)],
    "add.Scalar": lambda: [aten.add.Scalar(x, 0.3)], "sub.Scalar": lambda: [aten.sub.Scalar(x, 0.3)],
    "mul.Scalar": lambda: [aten.mul.Scalar(x, 0.3)], "div.Scalar": lambda: [aten.div.Scalar(x, 0.3)],
    "_safe_softmax": lambda: [aten._safe_softmax(x, -1)],
    "_softmax": lambda: [x.softmax(-1), batch.softmax(1)], "_log_softmax": lambda: [x.log_softmax(-1)],
    "native_layer_norm": lambda: [F.layer_norm(x, (128,), few, few), F.layer_norm(x, (128,))],
    "native_group_norm": lambda: [F.group_norm(images, 4, channels, channels)],
    "native_batch_norm": lambda: on_gpu(normalized, enabled=False) if x.is_cuda else normalized(),
    "cudnn_batch_norm": lambda: on_gpu(normalized)[::2] if x.is_cuda and torch.backends.cudnn.enabled else [],
    "convolution": lambda: on_gpu(lambda: [F.conv2d(large, filters), F.conv2d(large, filters, channels, padding=1)],
                                  deterministic=True) if x.is_cuda else [],
    "avg_pool2d": lambda: [F.avg_pool2d(large, 2, 1)],
    "mm": lambda: [x @ square], "addmm": lambda: [torch.addmm(few, x, square), F.linear(x, square, few)],
    "bmm": lambda: [batch @ weights],
    "baddbmm": lambda: [torch.baddbmm(zeros, batch, weights, beta=0.5)],
    "threshold_backward": lambda: [aten.threshold_backward(x, y, 0.1)],
    "gelu_backward": lambda: [aten.gelu_backward(x, y), aten.gelu_backward(x, y, approximate="tanh")],
    "silu_backward": lambda: [aten.silu_backward(x, y)], "tanh_backward": lambda: [aten.tanh_backward(x, y)],
    "sigmoid_backward": lambda: [aten.sigmoid_backward(x, y)],
    "_softmax_backward_data": lambda: [aten._softmax_backward_data(x, positive, -1, torch.float32)],
    "_log_softmax_backward_data": lambda: [aten._log_softmax_backward_data(x, y, -1, torch.float32)],
    "select_backward": lambda: [aten.select_backward(x, [3, 64, 128], 0, 1)],
    "slice_backward": lambda: [aten.slice_backward(x, [128, 128], 0, 0, 128, 2)],

    "rand": lambda: [torch.rand(64, 128)], "rand.generator": lambda: [torch.rand(64, 128, generator=mine())],
    "randn": lambda: [torch.randn(64, 128), torch.randn(65, 127, dtype=torch.float64)],
    "randn.generator": lambda: [torch.randn(64, 128, generator=mine())],
    "rand_like": lambda: [torch.rand_like(x)], "randn_like": lambda: [torch.randn_like(x, dtype=torch.float64)],
    "bernoulli": lambda: [torch.bernoulli(chances), torch.bernoulli(chances, generator=mine())],
    "bernoulli.p": lambda: [aten.bernoulli.p(x, 0.3)],
    "native_dropout": lambda: [*torch.native_dropout(large, 0.3, True)],
    "bernoulli_.float": lambda: [empty().bernoulli_(0.3), empty().bernoulli_(0.3, generator=mine()),
                                 *[torch.empty(131, 127, dtype=dtype).bernoulli_(0.3)
                                   for dtype in (torch.bool, torch.bfloat16, torch.int32, torch.float64)],
                                 empty().bernoulli_(0), empty().bernoulli_(1)],
    "bernoulli_.Tensor": lambda: [empty().bernoulli_(chances)],
    "uniform_": lambda: [empty().uniform_(-1, 2)], "normal_": lambda: [empty().normal_(1, 2), empty().t().normal_()],
    "exponential_": lambda: [empty().exponential_()], "random_": lambda: [empty().random_()],
    "random_.from": lambda: [empty().random_(3, 9)], "random_.to": lambda: [empty().random_(9)],

    "copy_": lambda: [x.clone(), batch.transpose(0, 1).contiguous(), batch.transpose(0, 1).reshape(48, 256),
                      x.double(), x.to(torch.bfloat16), empty().copy_(y[3]), part(lambda t: t.copy_(y[:9, :5]))],
    "fill_.Scalar": lambda: [empty().fill_(3), part(lambda t: t.fill_(3))],
    "zero_": lambda: [empty().zero_(), part(lambda t: t.zero_())],
    "add_.Tensor": lambda: [x.clone().add_(y, alpha=3), x.clone().add_(2), twice(lambda t: t.add_(t))],
    "sub_.Tensor": lambda: [x.clone().sub_(y)],
    "mul_.Tensor": lambda: [x.clone().mul_(y), part(lambda t: t.mul_(y[:9, :5])), twice(lambda t: t[:9].mul_(t[9:18]))],
    "div_.Tensor": lambda: [x.clone().div_(positive), x.clone().div_(3), x.clone().t().div_(few[:64])],
    "add_.Scalar": lambda: [aten.add_.Scalar(x.clone(), 0.3)], "sub_.Scalar": lambda: [aten.sub_.Scalar(x.clone(), 0.3)],
    "mul_.Scalar": lambda: [aten.mul_.Scalar(x.clone(), 0.3)], "div_.Scalar": lambda: [aten.div_.Scalar(x.clone(), 0.3)],
    "addcmul_": lambda: [x.clone().addcmul_(y, positive, value=0.5)],
    "addcdiv_": lambda: [x.clone().addcdiv_(y, positive, value=0.5)],
    "neg_": lambda: [x.clone().neg_()], "sqrt_": lambda: [positive.clone().sqrt_()], "exp_": lambda: [x.clone().exp_()],
    "clamp_": lambda: [x.clone().clamp_(-0.5, 0.5)], "clamp_min_": lambda: [x.clone().clamp_min_(0.1)],
    "masked_fill_.Scalar": lambda: [x.clone().masked_fill_(mask, -1e4)],
    "masked_fill_.Tensor": lambda: [x.clone().masked_fill_(mask, few[3])],
    "relu_": lambda: [x.clone().relu_(), part(lambda t: t.relu_())], "leaky_relu_": lambda: [F.leaky_relu_(x.clone())],
    "elu_": lambda: [F.elu_(x.clone())], "silu_": lambda: [F.silu(x.clone(), inplace=True)],
    "tanh_": lambda: [x.clone().tanh_()], "sigmoid_": lambda: [x.clone().sigmoid_()],
    "hardtanh_": lambda: [F.hardtanh_(x.clone())], "hardswish_": lambda: [F.hardswish(x.clone(), inplace=True)],
}
chances = torch.rand(64, 128)
filters = torch.randn(16, 16, 3, 3)

def normalized():
    return [F.batch_norm(images, mean, variance, channels, more, training=True),
            F.batch_norm(images, None, None, training=True),
            F.batch_norm(images, fixed_mean, fixed_variance, channels, channels)]
def on_gpu(make, enabled=None, deterministic=False):
    '''With cuDNN or without.'''
    enabled = torch.backends.cudnn.enabled if enabled is None else enabled
    with torch.backends.cudnn.flags(enabled=enabled, deterministic=deterministic):
        return make()
def mine():
    return torch.Generator(x.device).manual_seed(9)
def empty():
    return torch.empty(64, 128)
def part(change):
    '''Changes a piece of a result.'''
    result = x.clone()
    change(result[5:14, 7:12])
    return result
def twice(change):
    '''Changes a result by itself.'''
    result = x.clone()
    change(result)
    return result
def seeded(make):
    torch.manual_seed(3)
    return make()
"""
