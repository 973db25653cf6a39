# The kvq image: worker, tools, encryption and Flower. The GPU driver comes from the host (NVIDIA Container Toolkit).
FROM python:3.12-slim

# Kernels are compiled when a worker first starts, for the machine it is on.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/kvq
COPY . .
RUN pip install --no-cache-dir ".[flower,encryption]"

# The model cache is a volume: it must exist and belong to the user before one is mounted there.
RUN useradd --create-home kvq \
    && mkdir -p /home/kvq/.cache/huggingface /data \
    && chown -R kvq:kvq /home/kvq /data
USER kvq
WORKDIR /data

ENTRYPOINT ["kvq"]
CMD ["worker"]
