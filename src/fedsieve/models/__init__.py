"""On what: the networks."""

from fedsieve.models.networks import MODELS, build, check_outputs, cnn, mlp, vgg11, vgg11_bn

__all__ = ["MODELS", "build", "check_outputs", "cnn", "mlp", "vgg11", "vgg11_bn"]
