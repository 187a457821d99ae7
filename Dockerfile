# docker build --target cpu -t jaxtrain:cpu .      docker build --target cuda -t jaxtrain:cuda .
# docker run --rm jaxtrain:cpu run --config configs/digits.yaml
# docker run --rm --gpus all --shm-size=8g jaxtrain:cuda doctor
FROM python:3.12-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY configs ./configs
COPY torch_bridge ./torch_bridge
COPY jaxtrain ./jaxtrain

# JAX's and torch's wheels for CUDA bring their libraries; the host brings the driver.
FROM base AS cuda
RUN pip install '.[cuda,torch]'
RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["jaxtrain"]
CMD ["--help"]

FROM base AS cpu
RUN pip install torch --index-url https://download.pytorch.org/whl/cpu && pip install '.[torch]'
RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["jaxtrain"]
CMD ["--help"]
