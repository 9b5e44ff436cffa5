// A PyTorch device that is really asynchronous, on PrivateUse1, for tests on machines without an accelerator.
//
// There are two devices, whose memory is that of the host. Each stream has a thread, and an operator is queued there: its
// CPU kernel runs on the memory once everything that was queued before has run. Memory that is freed is overwritten in
// stream order, so that whatever reads it later sees kFreed. Waits of the host are noted by name for each thread. An error
// of a kernel is raised by the next call that waits or asks.
//
// It is written from the public headers of PyTorch: c10/core/impl/DeviceGuardImplInterface.h (streams and events),
// c10/core/CachingDeviceAllocator.h, ATen/detail/PrivateUse1HooksInterface.h, ATen/core/boxing (the fallback).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Stack = torch::jit::Stack;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;

constexpr int kDevices = 2;
constexpr int kStreams = 8;  // of each device and priority; after the default one, they are handed out in turns
constexpr int kFreed = 0xCD;
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;

std::atomic<bool> forked{false};
std::atomic<bool> has_float64{true};
std::atomic<int64_t> hazards{0};
thread_local std::string waits;
thread_local int current_device = 0;
thread_local int current_streams[kDevices] = {};

void note_wait(const char* what) { waits += std::string(what) + "\n"; }

// -- streams and events

struct Moment {  // reached when a stream has run what was queued before it
    std::mutex mutex;
    std::condition_variable reached;
    bool done = false;
    Clock::time_point time;

    void reach() {
        std::lock_guard<std::mutex> lock(mutex);
        done = true;
        time = Clock::now();
        reached.notify_all();
    }
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        reached.wait(lock, [&] { return done; });
    }
    bool query() {
        std::lock_guard<std::mutex> lock(mutex);
        return done;
    }
};

struct Errors {
    std::mutex mutex;
    std::string text[kDevices];

    void keep(int device, const std::string& what) {
        std::lock_guard<std::mutex> lock(mutex);
        if (text[device].empty()) text[device] = what;
    }
    void raise(int device) {
        std::string what;
        {
            std::lock_guard<std::mutex> lock(mutex);
            std::swap(what, text[device]);
        }
        if (!what.empty()) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 1, "simulated device: " + what);
    }
};
Errors& errors = *new Errors;

class Worker {
  public:
    explicit Worker(int device) : device_(device) {}

    void push(std::function<void()> task) {
        TORCH_CHECK(!forked, "cannot use the simulated device in a forked process");
        std::lock_guard<std::mutex> lock(mutex_);
        if (!started_) {
            started_ = true;
            std::thread([this] { work(); }).detach();
        }
        tasks_.push_back(std::move(task));
        more_.notify_one();
    }
    std::shared_ptr<Moment> moment() {
        auto moment = std::make_shared<Moment>();
        push([moment] { moment->reach(); });
        return moment;
    }
    bool idle() {
        std::lock_guard<std::mutex> lock(mutex_);
        return tasks_.empty() && !busy_;
    }

  private:
    void work() {
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        for (;;) {
            std::function<void()> task;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                busy_ = false;
                more_.wait(lock, [&] { return !tasks_.empty(); });
                busy_ = true;
                task = std::move(tasks_.front());
                tasks_.pop_front();
            }
            try {
                task();
            } catch (const std::exception& error) {
                errors.keep(device_, error.what());
            }
        }
    }

    const int device_;
    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<std::function<void()>> tasks_;
    bool started_ = false, busy_ = false;
};

struct Workers {
    std::vector<std::unique_ptr<Worker>> of[kDevices];
    std::atomic<int> next[kDevices] = {}, next_of_priority[kDevices] = {};

    Workers() {
        for (int device = 0; device < kDevices; ++device)
            for (int number = 0; number <= 2 * kStreams; ++number) of[device].push_back(std::make_unique<Worker>(device));
    }
    Worker& at(int device, int64_t number) { return *of[device].at(number); }
    Worker& at(const c10::Stream& stream) { return at(stream.device_index(), stream.id()); }
    Worker& current(int device) { return at(device, current_streams[device]); }
};
Workers& workers = *new Workers;  // never destroyed: threads use it until the process ends

void wait_for(Worker& worker, int device) {
    worker.moment()->wait();
    errors.raise(device);
}

void wait_for_device(int device) {
    std::vector<std::shared_ptr<Moment>> moments;
    for (auto& worker : workers.of[device])
        if (!worker->idle()) moments.push_back(worker->moment());
    for (auto& moment : moments) moment->wait();
}

struct Event {
    bool timed;
    int device = 0;
    std::shared_ptr<Moment> moment;
};

// -- memory

struct Block {
    void* data;
    size_t nbytes, capacity;
    int device, stream;
    std::set<int> used_by;  // other streams, told by record_stream
};

void free_block(void* context);

struct DeviceMemory final : c10::DeviceAllocator {
    std::mutex mutex;
    std::map<std::tuple<int, int, size_t>, std::vector<void*>> pool;  // by device, stream and capacity
    c10::CachingAllocator::Stat stats[kDevices];

    c10::DataPtr allocate(size_t nbytes) override {
        const Device device(kType, current_device);
        if (nbytes == 0) return {nullptr, device};
        size_t capacity = 64;
        while (capacity < nbytes) capacity *= 2;
        const int stream = current_streams[current_device];
        std::lock_guard<std::mutex> lock(mutex);
        auto& free = pool[{current_device, stream, capacity}];
        void* data = nullptr;
        if (free.empty()) {
            data = std::aligned_alloc(64, capacity);
            std::memset(data, kFreed, capacity);
        } else {
            data = free.back();
            free.pop_back();
        }
        stats[current_device].increase(nbytes);
        return {data, new Block{data, nbytes, capacity, current_device, stream, {}}, &free_block, device};
    }
    void give_back(const Block& block) {
        // Allocations of the same stream come after this in the order of the stream, so they may have it at once.
        workers.at(block.device, block.stream).push([data = block.data, capacity = block.capacity] {
            std::memset(data, kFreed, capacity);
        });
        std::lock_guard<std::mutex> lock(mutex);
        pool[{block.device, block.stream, block.capacity}].push_back(block.data);
    }
    void free(Block* block) {
        std::unique_ptr<Block> owned(block);
        if (forked) return;
        {
            std::lock_guard<std::mutex> lock(mutex);
            stats[block->device].decrease(block->nbytes);
        }
        if (block->used_by.empty()) return give_back(*block);
        auto last = std::shared_ptr<Block>(owned.release(), [this](Block* done) {
            give_back(*done);
            delete done;
        });
        for (int stream : last->used_by) workers.at(last->device, stream).push([last] {});
    }
    void record(const c10::DataPtr& data, const c10::Stream& stream) {
        auto* block = static_cast<Block*>(data.get_context());
        std::lock_guard<std::mutex> lock(mutex);
        if (block != nullptr && stream.id() != block->stream) block->used_by.insert(static_cast<int>(stream.id()));
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record(data, stream); }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
        std::lock_guard<std::mutex> lock(mutex);
        c10::CachingDeviceAllocator::DeviceStats all;
        all.allocated_bytes[0] = all.reserved_bytes[0] = all.active_bytes[0] = stats[device];
        return all;
    }
    void resetAccumulatedStats(DeviceIndex device) override {
        std::lock_guard<std::mutex> lock(mutex);
        stats[device].reset_accumulated();
    }
    void resetPeakStats(DeviceIndex device) override {
        std::lock_guard<std::mutex> lock(mutex);
        stats[device].reset_peak();
    }
};
DeviceMemory& memory = *new DeviceMemory;
void free_block(void* context) { memory.free(static_cast<Block*>(context)); }

struct PinnedMemory final : c10::Allocator {
    std::mutex mutex;
    std::map<const char*, size_t> ranges;
    std::atomic<double> seconds_per_byte{0};

    c10::DataPtr allocate(size_t nbytes) override {
        std::this_thread::sleep_for(std::chrono::duration<double>(seconds_per_byte * static_cast<double>(nbytes)));
        void* data = std::aligned_alloc(64, (nbytes / 64 + 1) * 64);
        std::lock_guard<std::mutex> lock(mutex);
        ranges[static_cast<char*>(data)] = nbytes;
        return {data, data, &PinnedMemory::release, c10::DeviceType::CPU};
    }
    static void release(void* data);
    bool holds(const void* data) {
        std::lock_guard<std::mutex> lock(mutex);
        auto after = ranges.upper_bound(static_cast<const char*>(data));
        if (after == ranges.begin()) return false;
        --after;
        return static_cast<const char*>(data) < after->first + std::max<size_t>(after->second, 1);
    }
    void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};
PinnedMemory& pinned = *new PinnedMemory;
void PinnedMemory::release(void* data) {
    {
        std::lock_guard<std::mutex> lock(pinned.mutex);
        pinned.ranges.erase(static_cast<char*>(data));
    }
    if (forked) return;
    // PyTorch's allocators of pinned memory keep it until the copies that use it are done. Here: all that are queued.
    std::shared_ptr<void> last(data, [](void* done) { std::free(done); });
    for (auto& device : workers.of)
        for (auto& worker : device)
            if (!worker->idle()) worker->push([last] {});
}

// -- random numbers

struct Generator final : c10::GeneratorImpl {
    at::Generator inner;  // of the CPU

    explicit Generator(DeviceIndex device, at::Generator of_cpu = at::detail::createCPUGenerator())
        : GeneratorImpl(Device(kType, device), c10::DispatchKeySet(kKey)), inner(std::move(of_cpu)) {}

    // As on other devices, the host draws when it queues an operator, so that the state does not depend on its progress.
    at::Generator draw() {
        std::lock_guard<std::mutex> lock(mutex_);
        return at::detail::createCPUGenerator(at::check_generator<at::CPUGeneratorImpl>(inner)->random64());
    }
    void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
    void set_offset(uint64_t) override {}
    uint64_t get_offset() const override { return 0; }
    uint64_t current_seed() const override { return inner.current_seed(); }
    uint64_t seed() override { return inner.seed(); }
    void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
    Generator* clone_impl() const override { return new Generator(device().index(), inner.clone()); }
};

at::Generator& default_generator(int device) {
    static auto& all = *new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
    return all.at(device < 0 ? current_device : device);
}

// -- what PyTorch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kType; }
    Device exchangeDevice(Device device) const override {
        const Device before = getDevice();
        setDevice(device);
        return before;
    }
    Device getDevice() const override { return Device(kType, current_device); }
    void setDevice(Device device) const override {
        TORCH_CHECK(device.index() < kDevices, "there are ", kDevices, " simulated devices");
        uncheckedSetDevice(device);
    }
    void uncheckedSetDevice(Device device) const noexcept override {
        if (device.index() >= 0) current_device = device.index();
    }
    static c10::Stream stream(Device device, int number) {
        const DeviceIndex index = device.index() < 0 ? current_device : device.index();
        return c10::Stream(c10::Stream::UNSAFE, Device(kType, index), number);
    }
    c10::Stream getStream(Device device) const override {
        return stream(device, current_streams[device.index() < 0 ? current_device : device.index()]);
    }
    c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
    c10::Stream getStreamFromGlobalPool(Device device, bool high) const override { return getNewStream(device, high ? -1 : 0); }
    c10::Stream getNewStream(Device device, int priority) const override {
        const int index = device.index() < 0 ? current_device : device.index();
        if (priority < 0) return stream(device, 1 + kStreams + workers.next_of_priority[index]++ % kStreams);
        return stream(device, 1 + workers.next[index]++ % kStreams);
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        const c10::Stream before = getStream(stream.device());
        current_streams[stream.device_index()] = static_cast<int>(stream.id());
        return before;
    }
    void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
    void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag flag) const override {
        if (*event == nullptr) *event = new Event{flag == c10::EventFlag::BACKEND_DEFAULT, 0, nullptr};
        static_cast<Event*>(*event)->device = stream.device_index();
        static_cast<Event*>(*event)->moment = workers.at(stream).moment();
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event == nullptr) return;
        workers.at(stream).push([moment = static_cast<Event*>(event)->moment] { moment->wait(); });
    }
    bool queryEvent(void* event) const override {
        if (event == nullptr) return true;
        errors.raise(static_cast<Event*>(event)->device);
        return static_cast<Event*>(event)->moment->query();
    }
    void synchronizeEvent(void* event) const override {
        if (event == nullptr) return;
        note_wait("Event.synchronize");
        static_cast<Event*>(event)->moment->wait();
        errors.raise(static_cast<Event*>(event)->device);
    }
    double elapsedTime(void* start, void* end, const DeviceIndex) const override {
        auto *from = static_cast<Event*>(start), *to = static_cast<Event*>(end);
        TORCH_CHECK(from->timed && to->timed, "both events need enable_timing=True");
        TORCH_CHECK(from->moment->query() && to->moment->query(), "the device has not reached both events");
        return std::chrono::duration<double, std::milli>(to->moment->time - from->moment->time).count();
    }
    DeviceIndex deviceCount() const noexcept override { return kDevices; }
    bool queryStream(const c10::Stream& stream) const override { return workers.at(stream).idle(); }
    void synchronizeStream(const c10::Stream& stream) const override {
        note_wait("Stream.synchronize");
        wait_for(workers.at(stream), stream.device_index());
    }
    void synchronizeDevice(const DeviceIndex index) const override {
        note_wait("synchronize");
        wait_for_device(index < 0 ? current_device : index);
        errors.raise(index < 0 ? current_device : index);
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        memory.record(data, stream);
    }
    c10::DeviceCapability getDeviceCapability(Device) const override {
        c10::DeviceCapability capability;
        if (!has_float64) capability.capability_data.supported_scalar_types.has_Double = 0;
        return capability;
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void grow(const c10::Storage& storage, size_t nbytes) {
    c10::DeviceGuard guard(storage.device());
    auto data = memory.allocate(nbytes);
    workers.current(storage.device().index())
        .push([to = data.get(), from = storage.data(), count = std::min(nbytes, storage.nbytes())] {
            if (count != 0) std::memcpy(to, from, count);
        });
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr(std::move(data));  // and frees the memory that it had, in the order of the stream
    impl->set_nbytes(nbytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return kDevices; }
    DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_device); }
    void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(kType, device)); }
    DeviceIndex exchangeDevice(DeviceIndex device) const override {
        return Guard().exchangeDevice(Device(kType, device)).index();
    }
    DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
    const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
    at::Generator getNewGenerator(DeviceIndex device) const override {
        return at::make_generator<Generator>(device < 0 ? current_device : device);
    }
    bool isPinnedPtr(const void* data) const override { return pinned.holds(data); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override { grow(storage, nbytes); }
};

const bool registered = [] {
    c10::SetAllocator(kType, &memory);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    return true;
}();

// -- operators

bool here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

Tensor marked(Tensor made, const Tensor& like) {
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    made._set_conj(like.is_conj());
    made._set_neg(like.is_neg());
    return made;
}

// The memory of a tensor as a CPU tensor, which does not keep the memory: only its owner does, as on any device.
Tensor on_cpu(const Tensor& tensor) {
    TORCH_CHECK(tensor.layout() == c10::kStrided, "the simulated device has strided tensors only");
    auto* data = const_cast<void*>(tensor.unsafeGetTensorImpl()->data());
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
    return marked(at::from_blob(data, tensor.sizes(), tensor.strides(), options), tensor);
}

Tensor on_meta(const Tensor& tensor) {
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kMeta);
    return marked(at::empty_strided(tensor.sizes(), tensor.strides(), options), tensor);
}

Tensor zeros_for(const Tensor& tensor) {
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
    return marked(at::empty_strided(tensor.sizes(), tensor.strides(), options).zero_(), tensor);
}

Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType dtype, DeviceIndex device) {
    TORCH_CHECK_TYPE(has_float64 || dtype != at::kDouble, "the simulated device does not support float64");
    c10::DeviceGuard guard(Device(kType, device));
    return at::detail::empty_strided_generic(sizes, strides, &memory, c10::DispatchKeySet(kKey), dtype);
}

using Map = std::function<Tensor(const Tensor&)>;

IValue mapped(const IValue& value, const Map& map) {
    if (value.isTensor()) return value.toTensor().defined() ? IValue(map(value.toTensor())) : value;
    if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& part : value.toTensorVector()) list.push_back(part.defined() ? map(part) : part);
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor>& part : value.toOptionalTensorVector())
            list.push_back(part.has_value() && part->defined() ? std::optional<Tensor>(map(*part)) : part);
        return list;
    }
    return value;
}

void each(const IValue& value, const std::function<void(const Tensor&)>& function) {
    mapped(value, [&](const Tensor& tensor) {
        function(tensor);
        return tensor;
    });
}

// Operators for whose results, or their shapes, the host has to know values. They wait on any device.
bool must_wait(const std::string& name, const Stack& arguments) {
    static const std::set<std::string> names{
        "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select",
        "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
        "aten::bincount", "aten::repeat_interleave", "aten::_unique"};
    if (names.count(name) != 0) return true;
    bool masked = false;
    if (name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_")
        for (const IValue& argument : arguments)
            if (argument.isOptionalTensorList() || argument.isTensorList())
                each(argument, [&](const Tensor& index) {
                    masked |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte || !here(index);
                });
    return masked;
}

Tensor of_cpu(const Tensor& tensor, const std::string& name) {
    TORCH_CHECK(tensor.dim() == 0 || name.find("index") != std::string::npos || tensor.numel() == 0,
                "Expected all tensors to be on the same device, but ", name, " got one on the CPU, too");
    return marked(tensor.clone(), tensor);
}

bool writes(const c10::Argument& argument) { return argument.alias_info() != nullptr && argument.alias_info()->isWrite(); }

void forward(const c10::OperatorHandle& op, Stack* stack) {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    c10::InferenceMode no_inference(false);
    const auto& schema = op.schema();
    const auto& name = schema.name();
    const size_t count = schema.arguments().size(), results = schema.returns().size();
    const Stack arguments(stack->end() - static_cast<int64_t>(count), stack->end());
    torch::jit::drop(*stack, count);

    int device = -1;
    for (const IValue& argument : arguments) {
        each(argument, [&](const Tensor& tensor) {
            if (!here(tensor)) return;
            TORCH_CHECK(device < 0 || device == tensor.device().index(),
                        "Expected all tensors to be on the same device, but ", name, " got two simulated devices");
            device = tensor.device().index();
        });
        if (device < 0 && argument.isDevice() && argument.toDevice().type() == kType) device = argument.toDevice().index();
    }
    if (device < 0) device = current_device;
    c10::DeviceGuard guard(Device(kType, device));

    const auto with = [&](const Map& map, c10::DeviceType type, const at::Generator* generator) {
        Stack made;
        for (size_t place = 0; place < count; ++place) {
            const auto& schema_type = *schema.arguments()[place].real_type();
            const IValue& argument = arguments[place];
            if (schema_type.str().rfind("Generator", 0) == 0)
                made.push_back(generator == nullptr ? IValue() : IValue(*generator));
            else if (argument.isDevice())
                made.push_back(Device(type));
            else
                made.push_back(mapped(argument, [&](const Tensor& tensor) {
                    return here(tensor) ? map(tensor) : of_cpu(tensor, name);
                }));
        }
        return made;
    };
    at::Generator drawn;
    for (size_t place = 0; place < count; ++place)
        if (schema.arguments()[place].real_type()->str().rfind("Generator", 0) == 0) {
            at::Generator of = default_generator(device);
            if (arguments[place].isGenerator()) of = arguments[place].toGenerator();
            TORCH_CHECK(of.device().type() == kType, "Expected a generator of the simulated device");
            drawn = static_cast<Generator*>(of.unsafeGetGeneratorImpl())->draw();
        }
    const at::Generator* generator = drawn.defined() ? &drawn : nullptr;

    Worker& worker = workers.current(device);
    auto on_host = std::make_shared<Stack>(with(on_cpu, c10::kCPU, generator));
    const auto to_device = [&](const Tensor& like) {
        return new_tensor(like.sizes(), like.strides(), like.scalar_type(), static_cast<DeviceIndex>(device));
    };
    bool wait = must_wait(name, arguments), fresh = false, empty_out = false;
    for (const auto& returned : schema.returns()) {
        TORCH_CHECK(returned.alias_info() == nullptr || writes(returned), "the simulated device has no view ", name);
        fresh |= returned.alias_info() == nullptr;
        wait |= returned.alias_info() == nullptr && returned.type()->str().rfind("Tensor", 0) != 0;
    }
    for (size_t place = 0; place < count; ++place)
        if (writes(schema.arguments()[place]))
            each(arguments[place], [&](const Tensor& out) { empty_out |= schema.arguments()[place].is_out() && out.numel() == 0; });

    Stack shapes;
    if (wait) {
        note_wait(name.c_str());
        wait_for(worker, device);
        shapes = *on_host;
        op.callBoxed(&shapes);
    } else if (fresh || empty_out) {
        try {
            shapes = with(on_meta, c10::kMeta, nullptr);
            op.callBoxed(&shapes);
        } catch (const std::exception&) {  // not every operator can compute shapes only
            shapes = with(zeros_for, c10::kCPU, generator);
            op.callBoxed(&shapes);
        }
    }
    size_t outs = 0;
    Stack made;
    std::vector<Tensor> host_results;
    for (size_t place = 0; place < results; ++place) {
        const auto& returned = schema.returns()[place];
        if (returned.alias_info() == nullptr) {
            made.push_back(mapped(shapes[place], to_device));
            continue;
        }
        for (; outs < count && !writes(schema.arguments()[outs]); ++outs) {}
        const IValue& written = arguments.at(outs++);
        if (!shapes.empty() && written.isTensor() && shapes[place].isTensor()) {
            const Tensor &out = written.toTensor(), &shape = shapes[place].toTensor();
            if (out.sizes() != shape.sizes()) {
                out.resize_(shape.sizes());
                on_host = std::make_shared<Stack>(with(on_cpu, c10::kCPU, generator));
            }
        }
        made.push_back(written);
    }
    if (!wait) {
        auto to = std::make_shared<Stack>();
        for (size_t place = 0; place < results; ++place)
            to->push_back(schema.returns()[place].alias_info() == nullptr ? mapped(made[place], on_cpu) : IValue());
        worker.push([op, on_host, to] {
            op.callBoxed(on_host.get());
            for (size_t place = 0; place < to->size(); ++place) {
                std::vector<Tensor> of;
                each((*on_host)[place], [&](const Tensor& result) { of.push_back(result); });
                size_t number = 0;
                each((*to)[place], [&](const Tensor& copy) { copy.copy_(of.at(number++)); });
            }
        });
    } else {
        for (size_t place = 0; place < results; ++place) {
            if (schema.returns()[place].alias_info() != nullptr) continue;
            std::vector<Tensor> of;
            each(shapes[place], [&](const Tensor& result) { of.push_back(result); });
            size_t number = 0;
            each(made[place], [&](const Tensor& copy) { on_cpu(copy).copy_(of.at(number++)); });
        }
    }
    stack->insert(stack->end(), made.begin(), made.end());
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
    const auto scalar = c10::dtype_or_default(dtype);
    TORCH_CHECK_TYPE(has_float64 || scalar != at::kDouble, "the simulated device does not support float64");
    c10::DeviceGuard guard(device.value_or(Device(kType)));
    return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(kKey), scalar, format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
    const auto index = device.has_value() && device->has_index() ? device->index() : static_cast<DeviceIndex>(current_device);
    return new_tensor(size, stride, c10::dtype_or_default(dtype), index);
}

void copy_on(Worker& worker, const Tensor& to, const Tensor& from, std::shared_ptr<Moment> after = nullptr) {
    worker.push([to, from, after] {
        if (after) after->wait();
        to.copy_(from);
    });
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    c10::InferenceMode no_inference(false);
    if (self.numel() == 0) return self;
    const bool from_here = here(source), to_here = here(self);
    const int device = (from_here ? source : self).device().index();
    Worker& worker = workers.current(device);
    if (from_here && to_here) {
        Worker& other = workers.current(self.device().index());
        const bool across = &other != &worker;
        copy_on(worker, on_cpu(self), on_cpu(source), across ? other.moment() : nullptr);
        if (across) other.push([moment = worker.moment()] { moment->wait(); });
        return self;
    }
    const Tensor& on_host = from_here ? self : source;
    if (non_blocking && pinned.holds(on_host.storage().data())) {  // kept by its allocator until the copy is done
        copy_on(worker, on_cpu(self), on_cpu(source));
        return self;
    }
    // Other devices may read or write pageable memory at any time, also after it is freed. It is reported, not done.
    if (non_blocking) {
        ++hazards;
        if (to_here) {
            copy_on(worker, on_cpu(self), marked(source.clone(), source));
            return self;
        }
    }
    note_wait("copy");
    from_here ? copy_on(worker, self, on_cpu(source)) : copy_on(worker, on_cpu(self), source);
    wait_for(worker, device);
    return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
    Tensor written = to;
    return copy_(written, self, non_blocking);
}

at::Scalar local_scalar_dense(const Tensor& self) {
    note_wait("item");
    wait_for(workers.current(self.device().index()), self.device().index());
    return on_cpu(self).item();
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
    auto* impl = self.unsafeGetTensorImpl();
    const size_t need = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
    if (need > self.storage().nbytes()) grow(self.storage(), need);
    impl->set_sizes_contiguous(size);
    if (format.has_value()) impl->empty_tensor_restride(*format);
    return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    if (stride.empty() && !size.empty())
        impl->set_sizes_contiguous(size);
    else
        impl->set_sizes_and_strides(size, stride);
    impl->set_storage_offset(offset);
    return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
    const int64_t size = static_cast<int64_t>(source.nbytes() / self.itemsize());
    return set_storage(self, std::move(source), 0, {size}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
    return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

bool is_set_to(const Tensor& self, const Tensor& other) {
    return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() && self.sizes() == other.sizes() &&
        self.storage_offset() == other.storage_offset() && self.strides() == other.strides();
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
    Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
    mask.bernoulli_(train.value_or(true) ? 1 - p : 1.0);
    return {at::mul(at::mul(input, mask), train.value_or(true) && p < 1 ? 1 / (1 - p) : 1.0), mask};
}

void record_stream(Tensor& self, c10::Stream stream) { memory.record(self.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&forward>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("copy_", copy_);
    m.impl("_copy_from", copy_from);
    m.impl("_local_scalar_dense", local_scalar_dense);
    m.impl("resize_", resize_);
    m.impl("set_.source_Storage", set_whole_storage);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("is_set_to", is_set_to);
    m.impl("record_stream", record_stream);
    m.impl("native_dropout", native_dropout);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("unfold", at::native::unfold);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
}

}  // namespace

// -- what the tests ask, by ctypes, which the dispatcher does not see

extern "C" {

void simulated_sleep(double milliseconds) {
    workers.current(current_device).push([milliseconds] {
        std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds));
    });
}
void simulated_fail(const char* text) {
    workers.current(current_device).push([what = std::string(text)] { throw std::runtime_error(what); });
}
const char* simulated_waits() { return waits.c_str(); }  // of the calling thread
void simulated_forget_waits() { waits.clear(); }
int64_t simulated_hazards() { return hazards; }
void simulated_pin_slowly(double seconds_per_byte) { pinned.seconds_per_byte = seconds_per_byte; }
void simulated_support_float64(bool whether) { has_float64 = whether; }
bool simulated_is_forked() { return forked; }
void simulated_finish() {
    if (forked) return;
    for (int device = 0; device < kDevices; ++device) wait_for_device(device);
}
void simulated_seed(int device, uint64_t seed) { default_generator(device).set_current_seed(seed); }
int64_t simulated_random_state(int device, uint8_t* into) {  // returns its size, and copies it unless into is null
    const Tensor state = default_generator(device).get_state();
    if (into != nullptr) std::memcpy(into, state.data_ptr(), state.nbytes());
    return static_cast<int64_t>(state.nbytes());
}
void simulated_set_random_state(int device, const uint8_t* from) {
    Tensor state = default_generator(device).get_state();
    std::memcpy(state.data_ptr(), from, state.nbytes());
    default_generator(device).set_state(state);
}

}  // extern "C"
