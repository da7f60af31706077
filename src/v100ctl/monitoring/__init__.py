"""What Prometheus and Grafana are told of a fleet: where its metrics are, when to raise an alarm, and how to show them."""
