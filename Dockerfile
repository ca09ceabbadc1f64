# syntax=docker/dockerfile:1
# fedemu in a container: docker build -t fedemu:0.1.0 .
# With GPUs: docker build --build-arg TORCH_INDEX=https://pypi.org/simple -t fedemu:0.1.0-cuda .
FROM python:3.11-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN python -m venv /opt/fedemu
ENV PATH=/opt/fedemu/bin:$PATH
WORKDIR /source
COPY constraints.txt ./
# torch first: it is the largest part, and changes least.
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple \
        "$(grep '^torch==' constraints.txt)"
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt .

FROM python:3.11-slim-bookworm
COPY --from=build /opt/fedemu /opt/fedemu
ENV PATH=/opt/fedemu/bin:$PATH FEDEMU_CACHE=/cache
# Volumes that are mounted here belong to the user of the container. Any other user (docker run --user) may write to two of them.
RUN useradd --uid 1000 --create-home fedemu \
    && install -d -o fedemu -g fedemu /keys /state /data \
    && install -d -m 1777 /work /cache
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["fedemu"]
CMD ["--help"]
