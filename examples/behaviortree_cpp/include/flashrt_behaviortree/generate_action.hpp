#ifndef FLASHRT_BEHAVIORTREE__GENERATE_ACTION_HPP_
#define FLASHRT_BEHAVIORTREE__GENERATE_ACTION_HPP_

#include <cstdint>
#include <string>

#include "flashrt_behaviortree/seconds.hpp"
#include "flashrt_ros/action/generate.hpp"
#include "nav2_behavior_tree/bt_action_node.hpp"

namespace flashrt_behaviortree
{

/**
 * @brief Let the model continue a session.
 *
 * RUNNING while the goal waits or generates. SUCCESS: the answer is whole. FAILURE: anything else,
 * a cancel by someone else included: the base class returns SUCCESS for a cancelled goal, and an
 * answer that was cut off is none. After a failure `text` holds what was generated until then.
 *
 * A port that the tree does not name leaves the goal's field at its own default.
 *
 * halt() of the base class cancels the goal and waits for the node to accept that, at most
 * `server_timeout`; `on_cancel` says where the session stands then. A goal that the node has not
 * acknowledged yet is not cancelled by it: `timeout` bounds what such a goal does.
 *
 * <FlashrtGenerate prompt="{instruction}" max_tokens="128" timeout="20.0" text="{plan}"
 *                  error_code_id="{flashrt_error_code}" error_msg="{flashrt_error_msg}"/>
 */
class GenerateAction : public nav2_behavior_tree::BtActionNode<flashrt_ros::action::Generate>
{
  using Action = flashrt_ros::action::Generate;

public:
  GenerateAction(
    const std::string & xml_tag_name, const std::string & action_name,
    const BT::NodeConfiguration & conf)
  : BtActionNode<Action>(xml_tag_name, action_name, conf) {}

  void on_tick() override
  {
    goal_ = Action::Goal();
    getInput("session", goal_.session);
    getInput("prompt", goal_.prompt);
    getInput("capsule", goal_.capsule);
    getInput("save_as", goal_.save_as);
    getInput("max_tokens", goal_.max_tokens);
    getInput("temperature", goal_.temperature);
    getInput("top_p", goal_.top_p);
    getInput("top_k", goal_.top_k);
    getInput("reseed", goal_.reseed);
    getInput("seed", goal_.seed);
    bool preempt = false;
    getInput("preempt", preempt);
    goal_.on_busy = preempt ? Action::Goal::PREEMPT : Action::Goal::DEFAULT;
    bool rollback = false;
    getInput("rollback_on_cancel", rollback);
    goal_.on_cancel = rollback ? Action::Goal::ROLLBACK : Action::Goal::KEEP;
    double timeout = 0.0;
    getInput("timeout", timeout);
    goal_.timeout = seconds(timeout);
  }

  BT::NodeStatus on_success() override {return finish(BT::NodeStatus::SUCCESS);}

  BT::NodeStatus on_aborted() override {return finish(BT::NodeStatus::FAILURE);}

  // SUCCESS in the base class.
  BT::NodeStatus on_cancelled() override {return finish(BT::NodeStatus::FAILURE);}

  // Newer bases call this where the node did not acknowledge a goal; older ones have no such hook,
  // so that `override` would not compile there.
  void on_timeout()
  {
    setOutput("error_code_id", Action::Result::TIMEOUT);
    setOutput("error_msg", std::string("The node did not acknowledge the goal: is it running?"));
  }

  static BT::PortsList providedPorts()
  {
    return providedBasicPorts(
      {
        BT::InputPort<std::string>("session", "Session to continue; '' is the default one"),
        BT::InputPort<std::string>("prompt", "One user turn"),
        BT::InputPort<std::string>("capsule", "Restore this capsule first"),
        BT::InputPort<std::string>("save_as", "Save the end of a successful goal"),
        BT::InputPort<int32_t>("max_tokens", "0 only prefills; -1: the node's parameter"),
        BT::InputPort<double>("temperature", "0 is greedy; -1: the node's parameter"),
        BT::InputPort<double>("top_p", "-1: the node's parameter"),
        BT::InputPort<int32_t>("top_k", "-1: the node's parameter"),
        BT::InputPort<bool>("reseed", "Give the sampler the seed"),
        BT::InputPort<uint64_t>("seed", "Read only with reseed"),
        BT::InputPort<bool>("preempt", "End a goal that runs in the session"),
        BT::InputPort<bool>("rollback_on_cancel", "A cancelled goal never happened"),
        BT::InputPort<double>("timeout", "Seconds, queue included; 0: the node's parameter"),
        BT::OutputPort<std::string>("text", "The answer"),
        BT::OutputPort<uint64_t>("position", "Of the session, at the end"),
        BT::OutputPort<uint64_t>("epoch", "Of the session, at the end"),
        BT::OutputPort<uint8_t>("finish_reason", "A constant of flashrt_ros/msg/Token"),
        BT::OutputPort<uint16_t>("error_code_id", "0 is success; see flashrt_ros/msg/ErrorCode"),
        BT::OutputPort<std::string>("error_msg", "A sentence that says what to do next"),
      });
  }

private:
  BT::NodeStatus finish(BT::NodeStatus status)
  {
    setOutput("text", result_.result->text);
    setOutput("position", result_.result->position);
    setOutput("epoch", result_.result->epoch);
    setOutput("finish_reason", result_.result->finish_reason);
    setOutput("error_code_id", result_.result->error_code);
    setOutput("error_msg", result_.result->error_msg);
    return status;
  }
};

}  // namespace flashrt_behaviortree

#endif  // FLASHRT_BEHAVIORTREE__GENERATE_ACTION_HPP_
