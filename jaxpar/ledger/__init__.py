"""What a plan costs, from three sides: predicted by closed forms, traced from the jaxpr, compiled from the HLO."""
