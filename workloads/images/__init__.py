"""Images from texts: what the workload text-to-image and its engines share."""
