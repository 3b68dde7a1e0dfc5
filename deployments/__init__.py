"""Ray Serve deployments: the ingress, the router actor, the request router and the replicas."""
