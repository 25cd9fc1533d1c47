"""Models of MXNet; they run where nothing but mxnet is installed."""


def dense(config):
    import mxnet as mx

    net = mx.gluon.nn.Dense(1, in_units=3)
    net.initialize(mx.init.Constant(0.1))
    return net


def squares(config):
    import mxnet as mx

    return mx.gluon.loss.L2Loss()


def module(config):
    import mxnet as mx

    out = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=1)
    loss = mx.sym.LinearRegressionOutput(out, mx.sym.var("label"))
    return mx.mod.Module(loss, data_names=["data"], label_names=["label"])


def squared_error(config):
    return "mse"


def mean_absolute_error(config):
    return "mae"


def no_model(config):
    raise KeyError("layers")
