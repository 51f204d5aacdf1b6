"""FedCM on Flower."""
